# SPDX-License-Identifier: Apache-2.0
"""Takes a plan off a model."""

from __future__ import annotations

import torch.nn as nn

from . import _fsdp_module, _optimizers
from ._applied import ATTRIBUTE, UNIT_ATTRIBUTE, applied_to
from ._errors import PlanError
from ._flat_whole import gather
from ._summon import whole_copy


def _make_whole(applied) -> None:
    """Every module holds its own whole parameters again; a tie stays one. Collective."""
    made: dict[int, nn.Parameter] = {}  # by id of the shard
    for unit, shards in zip(applied.plan.units, applied.shards):
        if unit.flat:
            shards.make_whole(gather(shards))
            continue
        for expected, sharded in zip(unit.parameters, shards):
            if id(sharded.shard) not in made:
                made[id(sharded.shard)] = whole_copy(sharded.shard)
            for slot in applied.by_fqn[expected.fqn].slots:
                slot.module.register_parameter(slot.name, made[id(sharded.shard)])


def remove(model: nn.Module) -> nn.Module:
    """Takes the plan off the model: its parameters are whole again, plain tensors on the device, without gradients; hooks and
    methods are gone. A step under way is given up. Optimizers made for the shards no longer fit. Collective. Returns the model."""
    applied = applied_to(model)
    if not applied.runtime.between_steps:
        applied.runtime.abandon()
    if any(expected.gathered for unit in applied.plan.units for expected in unit.parameters):
        raise PlanError("a plan with all-gather extensions is not taken off a model")
    _make_whole(applied)
    applied.unhook()
    for handle in applied.guards:
        handle.remove()
    _optimizers.forget(applied)
    _fsdp_module.take_methods(model)
    for module in model.modules():
        vars(module).pop(UNIT_ATTRIBUTE, None)
    vars(model).pop(ATTRIBUTE)
    for undo in (applied.undo_offload, applied.undo_recompute, *applied.undo):
        undo()
    return model
