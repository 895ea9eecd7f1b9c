# SPDX-License-Identifier: Apache-2.0
"""Steps are foreseen: by their arguments where these decide, else by the steps before."""

import random

import pytest

from shardplan.torch._replay.ways import NextPath


def wrong(ways: list[str], signatures: list[str]) -> list[int]:
    """Steps that were not foreseen."""
    paths, missed = NextPath(), []
    for number, (way, signature) in enumerate(zip(ways, signatures, strict=True)):
        paths.begins(signature)
        if paths.expected() != way:
            missed.append(number)
        paths.went(way)
    return missed


@pytest.mark.parametrize("pattern", ["a", "ab", "aab", "abc", "aabb", "abcbd", "aaaab"])
def test_patterns_are_foreseen_once_they_were_seen_twice(pattern):
    ways = list(pattern * 12)
    assert all(number < 2 * len(pattern) for number in wrong(ways, ["same"] * len(ways)))


@pytest.mark.parametrize("seed", range(5))
def test_arguments_that_decide_are_believed(seed):
    choose = random.Random(seed)
    ways = [choose.choice("abcd") for _ in range(200)]
    seen: set[str] = set()
    new = [number for number, way in enumerate(ways) if not (way in seen or seen.add(way))]
    assert set(wrong(ways, [way.upper() for way in ways])) <= set(new), f"seed {seed}"


def test_arguments_that_do_not_decide_are_not_believed():
    assert wrong(["a"] * 10 + ["a", "b"] * 10, ["x"] * 30)[-1] < 15


def test_many_lengths_are_no_reason_to_forget():
    assert wrong(["a"] * 3000, [str(length) for length in range(3000)]) == [0]
