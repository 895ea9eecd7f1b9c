# SPDX-License-Identifier: Apache-2.0
"""Parameters that are tied after auto(), before the first step: by an initialization that ties what the constructor did
not.

In one unit the plan is made again, of the tied model: the parameter is gathered once and its gradient reduced once.
Across units it stays: as under FSDP2 each unit gathers the one shard for itself, and the gradients that they reduce are
added up in the shard's.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch.nn as nn

from .._job.arguments import PlanError
from .._job.first_rank import from_first_rank
from .._model.units import Strategy
from .._parameters.shard import ShardedParameter, adopt_parameter
from .._plans.documents import names_of, plan_of
from .._plans.planning import make_plan
from .._replay.applied import Applied
from .switch import switch


@dataclasses.dataclass
class TiesMadeLater:
    """Looks once, where the first step begins, or an evaluation before it."""

    applied: weakref.ref[Applied]
    document: dict[str, Any]  # of the strategy
    where: list[str]
    strategy: Strategy
    ranks: list[int]

    @staticmethod
    def watch(
        applied: Applied, document: dict[str, Any], where: list[str], strategy: Strategy, ranks: list[int]
    ) -> None:
        later = TiesMadeLater(weakref.ref(applied), document, where, strategy, ranks)
        applied.runtime.at_next_forward(lambda _unit, module, _args, _kwargs: later.forward_begins(module))

    def forward_begins(self, module: nn.Module) -> Callable | None:
        """The module's pre-forward hook in another plan, where one is followed now."""
        applied = self.applied()
        if applied.flat_units():
            return None
        runtime = applied.runtime
        self._tie_within_units(applied)
        if ties := _ties(applied):
            for tie in ties:
                _share_shard(applied, tie)
            switch(applied, applied.plan, same_units=True)
        return None if applied.runtime is runtime else applied.hook_of(module)

    def _tie_within_units(self, applied: Applied) -> None:
        model = applied.skeleton.whole() if applied.skeleton is not None else None
        ties = [] if model is None else _ties_of_units(applied)
        if not ties:
            return
        for names, owner in ties:
            kept = _holder(model, min(owner))
            for name in names:
                module, own = _module_of(model, name)
                module.register_parameter(own, kept)

        def make() -> str:
            return make_plan("plan", self.strategy.outline(model), self.document, self.where)

        plan = plan_of(from_first_rank(make, self.ranks, applied.timeout_s))
        for names, owner in ties:
            found = applied.by_fqn[min(owner)]
            found.slots += applied.by_fqn[min(names)].slots
            applied.by_fqn.update(dict.fromkeys(names, found))
        switch(applied, plan, ties, same_units=True)


def _module_of(model: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    owner, _, own = fqn.rpartition(".")
    return model.get_submodule(owner), own


def _holder(model: nn.Module, fqn: str) -> nn.Parameter:
    module, own = _module_of(model, fqn)
    return module._parameters[own]


@dataclasses.dataclass
class _Planned:
    """A parameter as the plan has it, and what its modules hold."""

    unit: int
    expected: Any
    sharded: ShardedParameter
    held: nn.Parameter | None  # None: one module holds another than the next

    def has_its_shard(self) -> bool:
        return self.held is self.sharded.shard


def _planned(applied: Applied) -> list[_Planned]:
    found = []
    for number, (unit, of_unit) in enumerate(zip(applied.plan.units, applied.shards)):
        for expected, sharded in zip(unit.parameters, of_unit):
            held = {
                id(p): p for slot in applied.by_fqn[expected.fqn].slots for p in [slot.module._parameters[slot.name]]
            }
            found.append(_Planned(number, expected, sharded, held.popitem()[1] if len(held) == 1 else None))
    return found


def _ties_of_units(applied: Applied) -> list[tuple[frozenset[str], frozenset[str]]]:
    """Ties within units: the names of a parameter, and of another one whose shard the model has in its place."""
    planned = _planned(applied)
    owners = {(one.unit, id(one.sharded.shard)): one for one in planned}
    ties = [(one, owners.get((one.unit, id(one.held)))) for one in planned]
    return [
        (names_of(one.expected), names_of(owner.expected))
        for one, owner in ties
        if owner is not None and owner is not one
    ]


def _ties(applied: Applied) -> list[list[_Planned]]:
    """The parameters whose modules hold one and the same, those whose shard it is first."""
    by_held: dict[int, list[_Planned]] = {}
    for one in _planned(applied):
        if one.held is not None:
            by_held.setdefault(id(one.held), []).append(one)
    return [sorted(tie, key=lambda one: not one.has_its_shard()) for tie in by_held.values() if len(tie) > 1]


def _share_shard(applied: Applied, tie: list[_Planned]) -> None:
    """All get the shard, and the memory, of the first. PlanError where they cannot."""
    owner = tie[0]
    if not owner.has_its_shard():
        adopt_parameter(owner.expected, owner.sharded, owner.held)
    for other in tie[1:]:
        _check(applied, owner, other)
        other.sharded.shard, other.sharded.padded, other.sharded.spec = (
            owner.sharded.shard, owner.sharded.padded, owner.sharded.spec,
        )


def _check(applied: Applied, owner: _Planned, other: _Planned) -> None:
    tie = (
        f"{other.expected.fqn} of {_unit(applied, other)} was tied to {owner.expected.fqn} of {_unit(applied, owner)} "
        "behind shardplan.torch.auto"
    )
    way_out = "Make one unit of their modules: a group, or the root"
    for what, of_owner, of_other in (
        ("shape", list(owner.expected.shape), list(other.expected.shape)),
        ("dtype", owner.expected.dtype, other.expected.dtype),
        ("mesh", owner.sharded.spec.mesh, other.sharded.spec.mesh),
        ("placements", owner.sharded.spec.placements, other.sharded.spec.placements),
        ("memory of the host", applied.plan.shards_on_host(owner.unit), applied.plan.shards_on_host(other.unit)),
    ):
        if of_owner != of_other:
            raise PlanError(f"{tie}, and they differ in {what}: {of_other} and {of_owner}. {way_out}")
    rows, ranks = other.expected.shape[other.expected.shard_dim], applied.meshes[other.unit].ranks
    most = -(-rows // ranks)
    if most and rows % most:
        raise PlanError(
            f"{tie}, and its {rows} rows are not cut evenly by {ranks} ranks: the last of them has {rows % most} "
            f"instead of {most}. FSDP2 pads that one"
            " for each unit apart, so one of the two units would go on with the values before the first step. "
            f"{way_out}"
        )


def _unit(applied: Applied, planned: _Planned) -> str:
    return f"unit {applied.plan.units[planned.unit].fqn}" if applied.plan.units[planned.unit].fqn else "the root"
