# SPDX-License-Identifier: Apache-2.0
"""Profiles of several ranks: how long one waits in a collective for the others.

[Note: clocks of several ranks] A collective ends on its ranks at about one time. So a rank's clock is moved by the
median of the differences between the ends of its collectives and those of the reporting rank, which sets the clocks of
several machines, too.
"""

from __future__ import annotations

import collections

from . import spans
from .kineto import BadProfile, Profile, Work


def _in_order(profile: Profile) -> dict[tuple, list[Work]]:
    found = collections.defaultdict(list)
    for work in sorted(profile.work, key=lambda work: work.launched_ns):
        if work.collective is not None:
            found[work.collective.kind, work.collective.group, work.collective.full_tensor_bytes].append(work)
    return found


def check(profiles: list[Profile]) -> None:
    """BadProfile where two are of one rank, or not of one job."""
    by_rank: dict[int, Profile] = {}
    for profile in profiles:
        other = by_rank.setdefault(profile.rank, profile)
        if other is not profile:
            raise BadProfile(
                f"{profile.path}: rank {profile.rank} has two profiles (found another one in {other.path}, expected "
                "one of each rank)"
            )
        if profile.world_size != profiles[0].world_size:
            raise BadProfile(
                f"{profile.path}: of a job of {profile.world_size} ranks (expected {profiles[0].world_size}, as in "
                f"{profiles[0].path})"
            )


def waiting(own: Profile, others: list[Profile], window: tuple[int, int]) -> tuple[int, list[str]]:
    """Time until the last rank is there, summed over the collectives that `own` launches in the window; and notes."""
    latest: dict[int, int] = {}
    notes = []
    mine = _in_order(own)
    for other in others:
        theirs = _in_order(other)
        pairs = [
            (a, b)
            for key, works in mine.items()
            if own.rank == other.rank or _in_group(key[1], other.rank)
            for a, b in zip(works, theirs.get(key, []))
        ]
        if not pairs:
            notes.append(f"rank {other.rank} has no collective in common with rank {own.rank}")
            continue
        offset = spans.median([b.end_ns - a.end_ns for a, b in pairs])
        if abs(offset) > 1_000_000:
            notes.append(
                f"the clock of rank {other.rank} was set by {offset} ns, by the ends of {len(pairs)} collectives"
            )
        for a, b in pairs:
            latest[id(a)] = max(latest.get(id(a), a.begin_ns), b.begin_ns - offset)
    total = 0
    for works in mine.values():
        for work in works:
            if window[0] <= work.launched_ns < window[1]:
                total += min(max(0, latest.get(id(work), work.begin_ns) - work.begin_ns), work.duration_ns)
    return total, notes


def _in_group(group: tuple[int, ...], rank: int) -> bool:
    return not group or rank in group
