# SPDX-License-Identifier: Apache-2.0
"""Another plan for a model whose parameters are sharded already: other units, other recomputation, the same parameters."""

from __future__ import annotations

from ._applied import UNIT_ATTRIBUTE, Applied
from ._apply import mesh_of_unit
from ._errors import PlanError
from ._fsdp_module import give_methods
from ._kept_plans import KeptPlans
from ._mesh import process_groups
from ._peers import connect
from ._offload import offload
from ._recompute import recompute
from ._runtime import make_runtime, supply_shards


def _sharded_by_name(plan, shards: list) -> dict[tuple, tuple]:
    return {
        (expected.fqn, *sorted(expected.shared_with)): (expected, plan.shards_on_host(number), sharded)
        for number, (unit, of_unit) in enumerate(zip(plan.units, shards))
        for expected, sharded in zip(unit.parameters, of_unit)
    }


def _regrouped(plan, old, shards: list) -> list[list]:
    """The sharded parameters by the units of `plan`. PlanError unless each lies as the plan has it."""
    there = _sharded_by_name(old, shards)
    result = []
    for number, unit in enumerate(plan.units):
        of_unit = []
        for wanted in unit.parameters:
            expected, on_host, sharded = there.pop((wanted.fqn, *sorted(wanted.shared_with)), (None, None, None))
            if expected is None:
                raise PlanError(f"parameter {wanted.fqn} of the next plan is tied otherwise")
            if plan.shards_on_host(number) != on_host:
                raise PlanError(f"parameter {wanted.fqn} of the next plan lies in other memory (offload)")
            if wanted.shard_dim != expected.shard_dim or list(wanted.shape) != list(expected.shape):
                raise PlanError(f"parameter {wanted.fqn} of the next plan lies otherwise: along dimension {wanted.shard_dim}, now {expected.shard_dim}")
            of_unit.append(sharded)
        result.append(of_unit)
    if there:
        raise PlanError(f"parameter {next(iter(there))[0]} is in no unit of the next plan")
    return result


def switch(applied: Applied, plan) -> None:
    """From the step that begins on, the model follows `plan`. Collective. Parameters, gradients and optimizers stay the same objects. PlanError, before anything has changed, for a plan of other parameters."""
    if applied.flat_units():
        raise PlanError("a plan of flat parameters is not exchanged")
    shards = _regrouped(plan, applied.plan, applied.shards)

    def make_groups() -> tuple:
        return [mesh_of_unit(plan, unit, applied.model, applied.mesh) for unit in plan.units], process_groups(
            plan, applied.mesh, applied.made_groups, applied.timeout_s
        )

    meshes, groups = connect(make_groups, applied.timeout_s)
    runtime = make_runtime(plan, applied.mesh, applied.device, groups, applied.memory, applied.timeout_s)
    step, replans = applied.runtime.step, applied.following.replans
    applied.runtime.restart()
    applied.unhook()
    applied.undo_offload()
    applied.undo_recompute()
    for module in applied.model.modules():
        vars(module).pop(UNIT_ATTRIBUTE, None)
    applied.plan, applied.meshes, applied.groups, applied.runtime, applied.shards = plan, meshes, groups, runtime, shards
    applied.settings, applied.sync = {}, None
    for number, (unit, sharded) in enumerate(zip(plan.units, shards)):
        supply_shards(runtime, number, unit, sharded)
    applied.undo_recompute = recompute(plan, applied.model)
    applied.undo_offload = offload(plan, applied.model, applied.device, runtime)
    applied.start()
    runtime.step = step
    applied.following = KeptPlans(applied)
    if replans:
        applied.following.fall_back_on_deviation()
    give_methods(applied)
