# SPDX-License-Identifier: Apache-2.0
"""The configurations of a sweep: the product of its axes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from shardplan.titan import variants

AXES = ("source", "batch", "seq", "ranks", "cluster")
_MOST_AT_ONCE = 32  # rows that a killed sweep loses at most, by worker
ABSENT, BARE = "-", "+"  # a flag that is not given, and one that is given without a value


@dataclass(frozen=True)
class Configuration:
    """Values by axis, in the order of the sweep's axes."""

    values: tuple[tuple[str, str], ...]

    def __getitem__(self, axis: str) -> str:
        return dict(self.values)[axis]

    def get(self, axis: str) -> str:
        return dict(self.values).get(axis, "")

    def replace(self, axis: str, value: object) -> Configuration:
        return Configuration(tuple((name, str(value) if name == axis else old) for name, old in self.values))

    def job_values(self) -> list[tuple[str, str]]:
        """Values of torchtitan's keys."""
        return [(axis, value) for axis, value in self.values if variants.is_key(axis) and value != ABSENT]

    def plan_flags(self) -> list[str]:
        """Flags of `shardplan plan` that the axes stand for."""
        flags = []
        for axis, value in self.values:
            if axis in ("source", "batch", "seq") or value in ("", ABSENT) or variants.is_key(axis):
                continue
            flags.append(f"--{axis}")
            if axis in AXES:  # names of files, which may hold anything
                flags.append(value)
            elif value != BARE:
                flags += value.split(" ")
        return flags


def product(axes: dict[str, list[str]]) -> list[Configuration]:
    return [Configuration(tuple(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def part_of(configurations: list[Configuration], text: str) -> list[Configuration]:
    """Part i of n, "i/n" from 1: every n-th."""
    part, parts = (int(number) for number in text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError
    return configurations[part - 1 :: parts]


def groups_of(configurations: list[Configuration], workers: int) -> list[list[Configuration]]:
    """Groups that one process takes at a time: configurations that share a trace and a plan side by side, few enough
    for all workers to be busy."""
    if not configurations:
        return []
    axes = [axis for axis, _ in configurations[0].values]
    last = [axis for axis in ("ranks", "cluster") if axis in axes]
    order = {c: place for place, c in enumerate(configurations)}
    first_of: dict[tuple, int] = {}

    def key(configuration: Configuration) -> list[int]:
        """The place of the first that is like it up to the last axes, then up to the last but one, ..."""
        values = dict(configuration.values)
        prefixes = [tuple(values[axis] for axis in axes if axis not in last[place:]) for place in range(len(last))]
        return [
            *(first_of.setdefault((place, prefix), order[configuration]) for place, prefix in enumerate(prefixes)),
            order[configuration],
        ]

    size = max(1, min(_MOST_AT_ONCE, len(configurations) // (8 * workers)))
    together = sorted(configurations, key=key)
    return [together[start : start + size] for start in range(0, len(together), size)]
