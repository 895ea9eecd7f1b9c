# SPDX-License-Identifier: Apache-2.0
"""To which part of a step work belongs: the pass, the unit of FSDP, and the class of its operators.

[Note: units] FSDP2, and plans, name the unit in their ranges. X's forward is all that the host launches between the end
of `FSDP::pre_forward (X)` and `FSDP::post_forward (X)`. X's backward lies between `FSDP::pre_backward (X)` and the
first of `FSDP::post_backward_* (X)`. The innermost unit counts. FSDP1's ranges name nobody: its forwards are nested and
begin in the order of the plan's units. Its backwards come in the reverse order of the ends of the forwards.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import pathlib
import re

from .kineto import Profile, Work

ROOT = "(root)"
_FSDP2 = re.compile(r"FSDP::(\w+?)(?: \((.*)\)| for (.*))?\Z", re.DOTALL)
_FSDP1 = "FullyShardedDataParallel."
_OPTIMIZER = re.compile(r"Optimizer\.(step|zero_grad)#")
_COPIES = ("fsdp::", "aten::split_with_sizes_copy", "aten::chunk_cat", "aten::_chunk_cat")

# Shared with the simulator (simulator/src/cost/operator_class.h).
_CLASSES = json.loads((pathlib.Path(__file__).parent / "operator_classes.json").read_text())


@dataclasses.dataclass(frozen=True)
class Part:
    """phase: "forward", "backward", "optimizer"; "communication": FSDP's own copies and collectives. unit: "" of
    none."""

    phase: str
    unit: str
    kind: str


@functools.cache
def _class_of_name(name: str) -> str | None:
    plain = name.partition("::")[2].partition(".")[0]
    for entry in _CLASSES:
        if plain in entry["names"] or any(part in plain for part in entry["parts"]):
            return entry["class"]
    return None


def class_of(work: Work) -> str:
    """The innermost operator that a class knows decides."""
    for name in reversed(work.operators):
        if "::" in name and not name.startswith("autograd::") and (kind := _class_of_name(name)) is not None:
            return kind
    if any(name.startswith("aten::") for name in work.operators):
        return "elementwise"
    return "memset" if work.name.startswith("Memset") else "other"


def _fqn(match: re.Match) -> str:
    return match.group(2) or match.group(3) or ROOT


class _Units:
    """Which unit's forward or backward the host is in, by moments at which that changes."""

    def __init__(self, profile: Profile, units: list[str]) -> None:
        changes: list[tuple[int, bool, str]] = []  # when, does it begin, unit
        for one in profile.ranges:
            match = _FSDP2.match(one.name)
            if match is None:
                continue
            if match.group(1) in ("pre_forward", "pre_backward"):
                changes.append((one.end_ns, True, _fqn(match)))
            elif match.group(1) == "root_post_backward_callback":
                changes.append((one.begin_ns, False, ROOT))
            elif match.group(1) == "post_forward" or match.group(1).startswith("post_backward"):
                changes.append((one.begin_ns, False, _fqn(match)))
        if not changes:
            changes = list(_fsdp1_changes(profile, units))
        changes.sort(key=lambda change: (change[0], change[1]))
        self._times, self._stacks = [], []
        stack: list[str] = []
        for when, begins, unit in changes:
            if begins:
                stack.append(unit)
            elif unit in stack:
                stack.reverse()
                stack.remove(unit)
                stack.reverse()
            self._times.append(when)
            self._stacks.append(stack[-1] if stack else "")
        self.found = bool(changes)

    def at(self, moment: int) -> str:
        position = bisect.bisect_right(self._times, moment) - 1
        return self._stacks[position] if position >= 0 else ""


def _fsdp1_changes(profile: Profile, units: list[str]):
    for begin, end in profile.steps:
        of_step = [one for one in profile.ranges if begin <= one.begin_ns < end and one.name.startswith(_FSDP1)]
        forwards = [one for one in of_step if one.name == _FSDP1 + "forward"]
        if len(forwards) != len(units):
            continue  # units that run several times, or not at all: nobody knows which is which
        named = list(zip(forwards, units))
        for one, unit in named:
            yield one.begin_ns, True, unit
            yield one.end_ns, False, unit
        backwards = [unit for _, unit in sorted(named, key=lambda pair: -pair[0].end_ns)]
        pre = [one for one in of_step if one.name == _FSDP1 + "_pre_backward_hook"]
        post = [one for one in of_step if one.name == _FSDP1 + "_post_backward_hook"]
        if len(pre) != len(units):
            continue
        for one, unit in zip(pre, backwards):
            yield one.end_ns, True, unit
        inner_first = [unit for unit in backwards if unit != units[0]] + units[:1]
        for one, unit in zip(post, inner_first):
            yield one.begin_ns, False, unit


class Parts:
    """of(work) for the work of a profile. units: the plan's, in their order."""

    def __init__(self, profile: Profile, units: list[str]) -> None:
        self._units = _Units(profile, units)
        self.names_units = self._units.found or bool(profile.instructions)

    def of(self, work: Work) -> Part:
        if work.part is not None:
            return work.part
        for name in reversed(work.ranges):
            match = _FSDP2.match(name)
            if match is not None and match.group(1) in ("all_gather", "all_gather_copy_out", "post_backward_reduce"):
                return Part("communication", _fqn(match), work.collective.kind if work.collective else "copy")
        if work.collective is not None:
            return Part("communication", self._units.at(work.launched_ns), work.collective.kind)
        if any(_OPTIMIZER.match(name) for name in work.ranges):
            return Part("optimizer", "", "optimizer")
        if any(name.startswith(_COPIES) for name in work.operators):
            return Part("communication", self._units.at(work.launched_ns), "copy")
        phase = "backward" if any(name.startswith("autograd::engine") for name in work.operators) else "forward"
        return Part(phase, self._units.at(work.launched_ns), class_of(work))
