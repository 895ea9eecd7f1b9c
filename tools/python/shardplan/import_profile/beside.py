# SPDX-License-Identifier: Apache-2.0
"""Collectives that only a profile has, or only its plan."""

from __future__ import annotations

Sums = dict[tuple[str, str], tuple[int, int]]  # number and bytes in a step, by kind and communicator


def planned(simulated: dict, hidden: Sums) -> Sums:
    """The plan's collectives, less those that the profile cannot have."""
    sums: Sums = {}
    for entry in simulated["collectives"]:
        key = entry["kind"], entry["communicator"]
        count, bytes_ = sums.get(key, (0, 0))
        sums[key] = count + entry["count"], bytes_ + entry["full_tensor_bytes"]
    for key, (count, bytes_) in hidden.items():
        sums[key] = sums[key][0] - count, sums[key][1] - bytes_
    return {key: own for key, own in sums.items() if own[0] > 0}


def counted(collectives: list[dict], expected_of: Sums) -> tuple[int, int, list[str]]:
    """Collectives that only the profile has, that only the plan has, and what to say of bytes."""
    found = {
        (entry["kind"], entry["communicator"]): (entry["count"], entry["full_tensor_bytes"]) for entry in collectives
    }
    beside = missing = 0
    notes = []
    for key in sorted(expected_of.keys() | found.keys()):
        (count, bytes_), (expected, expected_bytes) = found.get(key, (0, 0)), expected_of.get(key, (0, 0))
        beside += max(0, count - expected)
        missing += max(0, expected - count)
        if count == expected and bytes_ not in (0, expected_bytes):
            beside, missing = beside + count, missing + count
        if (count, bytes_) != (expected, expected_bytes) and not (count == expected and bytes_ == 0):
            notes.append(
                f"{key[0]} on {key[1]}: {count} of {bytes_} bytes in a step, the plan has {expected} of "
                f"{expected_bytes}"
            )
    return beside, missing, notes
