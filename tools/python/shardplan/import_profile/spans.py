# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of times: unions of intervals, and what they have in common."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

Intervals = list[tuple[int, int]]


def union(intervals: Iterable[tuple[int, int]]) -> Intervals:
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > begin:
            merged.append((begin, end))
    return merged


def length(intervals: Intervals) -> int:
    return sum(end - begin for begin, end in intervals)


def minus(a: Intervals, b: Intervals) -> Intervals:
    """The set difference of two unions of intervals."""
    left: Intervals = []
    position = 0
    for begin, end in a:
        while position < len(b) and b[position][1] <= begin:
            position += 1
        at = position
        while at < len(b) and b[at][0] < end:
            if b[at][0] > begin:
                left.append((begin, b[at][0]))
            begin = max(begin, b[at][1])
            at += 1
        if begin < end:
            left.append((begin, end))
    return left


def median(values: list[int]) -> int:
    return round(statistics.median(values)) if values else 0
