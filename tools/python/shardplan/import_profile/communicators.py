# SPDX-License-Identifier: Apache-2.0
"""The plan's communicator of each collective that a profile has.

[Note: which communicator] Five things tell the communicators of a kind apart: their size, their ranks, torch's name for
the group (that of its mesh dimension), whether FSDP or the model calls it, and the bytes. Each of these counts if the
profile says it and it leaves at least one communicator. Only a size that none has leaves none. Ranges of FSDP's enclose
its own collectives. Gloo says no group: there the last two decide.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re

from .kineto import Collective, Profile, Work

# FSDP2 and a plan's runtime have their own ranges; FSDP1's forward has the model's inside.
_OF_FSDP = re.compile(r"FSDP::|FullyShardedDataParallel\.(?!forward)")


@dataclasses.dataclass
class _Planned:
    name: str
    ranks: tuple[int, ...]  # with the profile's rank
    of_fsdp: int = 0  # in a step
    of_model: int = 0
    model_bytes: int = 0
    sizes: set[int] = dataclasses.field(default_factory=set)  # of the model's


def ranks_of(communicator: dict, rank: int) -> tuple[int, ...]:
    """The group that the rank is in."""
    dims = communicator.get("dims") or [communicator]
    digits = [(one.get("size", 1), one.get("stride", 1)) for one in dims]
    first = rank - sum(rank // stride % size * stride for size, stride in digits)
    offsets = itertools.product(*(range(0, size * stride, stride) for size, stride in digits))
    return tuple(sorted(first + sum(offset) for offset in offsets))


def _of_segment(entries: list[list]) -> list[dict]:
    """A group of sends and receives is one (collectives.py), of its first."""
    found, first_of = [], {}
    for entry in entries:
        one = entry[-1]
        if entry[0] != "op" or not isinstance(one, dict):
            continue
        if (batch := one.get("batch", -1)) < 0 or one["kind"] not in ("send", "recv"):
            found.append(one)
            continue
        if batch not in first_of:
            first_of[batch] = {**one, "ways": collections.Counter()}
            found.append(first_of[batch])
        first_of[batch]["ways"][one["kind"]] += one["size_bytes"]
        first_of[batch]["size_bytes"] = max(first_of[batch]["ways"].values())
    return found


def of_model(plan: dict) -> list[dict]:
    """The model's own collectives in a step."""
    segments = {segment["name"]: segment["entries"] for segment in plan.get("segments", [])}
    names = [
        instruction["segment"]
        for trigger in plan["steps"][-1]["triggers"]
        for instruction in trigger.get("instructions", [])
        if instruction.get("segment") in segments
    ]
    return [one for name in names for one in _of_segment(segments[name])]


class Communicators:
    """simulated: the plan's report, which has all collectives of a step."""

    def __init__(self, plan: dict, simulated: dict, rank: int) -> None:
        groups = {one.get("name", ""): ranks_of(one, rank) for one in plan.get("communicators", [])}
        self._by_kind: dict[str, dict[str, _Planned]] = collections.defaultdict(dict)

        def planned(kind: str, name: str) -> _Planned:
            return self._by_kind[kind].setdefault(name, _Planned(name, groups.get(name, ())))

        for one in of_model(plan):
            entry = planned(one["kind"], one["communicator"])
            entry.of_model += 1
            entry.model_bytes += one["size_bytes"]
            entry.sizes.add(one["size_bytes"])
        for row in simulated["collectives"]:
            planned(row["kind"], row["communicator"]).of_fsdp += row["count"]
        for entries in self._by_kind.values():
            for entry in entries.values():
                entry.of_fsdp -= entry.of_model

    def of_models(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Number and bytes of the model's own in a step, by kind and communicator."""
        return {
            (kind, entry.name): (entry.of_model, entry.model_bytes)
            for kind, entries in self._by_kind.items()
            for entry in entries.values()
            if entry.of_model > 0
        }

    def find(self, work: Work) -> Collective:
        """The work's collective with its communicator, and the ranks that this has where the profile has none."""
        one = work.collective
        assert one is not None
        fitting = [
            entry
            for entry in self._by_kind.get(one.kind, {}).values()
            if one.ranks in (0, len(entry.ranks))
        ]
        by_fsdp = any(_OF_FSDP.match(name) for name in work.ranges)
        name = one.group_name.removeprefix("mesh_")
        for keep in (
            lambda entry: entry.ranks == one.group,
            lambda entry: entry.name == name,
            lambda entry: (entry.of_fsdp if by_fsdp else entry.of_model) > 0,
            lambda entry: one.full_tensor_bytes in entry.sizes,
        ):
            fitting = [entry for entry in fitting if keep(entry)] or fitting
        if not fitting:
            return dataclasses.replace(one, communicator=_unknown(one))
        chosen = fitting[0]
        ranks = one.group or chosen.ranks
        of_model = chosen.of_model > 0 and not (by_fsdp and chosen.of_fsdp > 0)
        return dataclasses.replace(one, group=ranks, communicator=chosen.name, of_model=of_model)


def _unknown(one: Collective) -> str:
    """For people: the group by torch's name and its size."""
    named = "a group" if one.group_name in ("", "default_pg") else one.group_name
    return f"{named} of {one.ranks} ranks" if one.ranks else one.group_name or "unknown"


def assign(profile: Profile, plan: dict, simulated: dict) -> Communicators:
    """Fills in the communicators of all its collectives."""
    communicators = Communicators(plan, simulated, profile.rank)
    for work in profile.work:
        if work.collective is not None:
            work.collective = communicators.find(work)
    return communicators
