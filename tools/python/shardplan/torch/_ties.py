# SPDX-License-Identifier: Apache-2.0
"""Parameters that are tied after auto(), before the first step: by an initialization that ties what the constructor did not."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch.nn as nn

from ._applied import Applied
from ._first_rank import from_first_rank
from ._outline import outline
from ._planning import make_plan, plan_of
from ._switch import names_of, switch


@dataclasses.dataclass
class TiesMadeLater:
    """Looks once, where the first step begins. A plan is then made of the tied model; one across units is refused by who takes over parameters."""

    applied: weakref.ref[Applied]
    document: dict[str, Any]  # the strategy
    where: list[str]
    own_dims: set[str]
    ranks: list[int]

    @staticmethod
    def watch(applied: Applied, document: dict[str, Any], where: list[str], own_dims: set[str], ranks: list[int]) -> None:
        later = TiesMadeLater(weakref.ref(applied), document, where, own_dims, ranks)
        applied.before_next_step(later.step_begins)

    def step_begins(self, *_entered: object) -> None:
        applied = self.applied()
        model = applied.skeleton.whole() if applied.skeleton is not None else None
        ties = [] if model is None or applied.flat_units() else _ties(applied)
        if not ties:
            return
        for names, owner in ties:
            kept = _holder(model, min(owner))
            for name in names:
                module, own = _module_of(model, name)
                module.register_parameter(own, kept)

        def make() -> str:
            return make_plan("plan", outline(model, self.own_dims), self.document, self.where)

        plan = plan_of(from_first_rank(make, self.ranks, applied.timeout_s))
        for names, owner in ties:
            found = applied.by_fqn[min(owner)]
            found.slots += applied.by_fqn[min(names)].slots
            applied.by_fqn.update(dict.fromkeys(names, found))
        switch(applied, plan, ties)


def _module_of(model: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    owner, _, own = fqn.rpartition(".")
    return model.get_submodule(owner), own


def _holder(model: nn.Module, fqn: str) -> nn.Parameter:
    module, own = _module_of(model, fqn)
    return module._parameters[own]


def _ties(applied: Applied) -> list[tuple[frozenset[str], frozenset[str]]]:
    """Of parameters in one unit: the names of one, and of another whose shard the model has in its place."""
    ties = []
    for unit, of_unit in zip(applied.plan.units, applied.shards):
        owners = {id(sharded.shard): expected for expected, sharded in zip(unit.parameters, of_unit)}
        for expected, sharded in zip(unit.parameters, of_unit):
            held = {id(slot.module._parameters[slot.name]) for slot in applied.by_fqn[expected.fqn].slots}
            owner = owners.get(held.pop()) if len(held) == 1 else None
            if owner is not None and owner is not expected:
                ties.append((names_of(expected), names_of(owner)))
    return ties
