# SPDX-License-Identifier: Apache-2.0
"""Another plan for a model whose parameters are sharded already: other units, other recomputation, the same
parameters."""

from __future__ import annotations

from collections.abc import Iterable

from .._calls.fsdp_module import give_methods
from .._job.arguments import PlanError
from .._job.mesh import process_groups
from .._job.peers import connect
from .._parameters.rules import mesh_of_unit
from .._plans.documents import names_of
from .._replay.applied import UNIT_ATTRIBUTE, Applied
from .._replay.runtime import make_runtime, supply_shards

# Names of a parameter, and of the one that the model has in its place.
Ties = Iterable[tuple[frozenset[str], frozenset[str]]]


def _sharded_by_name(plan, shards: list) -> dict[frozenset[str], tuple]:
    return {
        names_of(expected): (expected, plan.shards_on_host(number), sharded)
        for number, (unit, of_unit) in enumerate(zip(plan.units, shards))
        for expected, sharded in zip(unit.parameters, of_unit)
    }


def _regrouped(plan, old, shards: list, ties: Ties) -> list[list]:
    """The sharded parameters by the units of `plan`. PlanError unless each lies as the plan has it."""
    there = _sharded_by_name(old, shards)
    for names, owner in ties:
        there.pop(names)
        there[names | owner] = there.pop(owner)
    result = []
    for number, unit in enumerate(plan.units):
        of_unit = []
        for wanted in unit.parameters:
            expected, on_host, sharded = there.pop(names_of(wanted), (None, None, None))
            if expected is None:
                raise PlanError(f"parameter {wanted.fqn} of the next plan is tied otherwise")
            if plan.shards_on_host(number) != on_host:
                raise PlanError(f"parameter {wanted.fqn} of the next plan lies in other memory (offload)")
            if wanted.shard_dim != expected.shard_dim or list(wanted.shape) != list(expected.shape):
                raise PlanError(
                    f"parameter {wanted.fqn} of the next plan lies otherwise: along dimension {wanted.shard_dim}, now "
                    f"{expected.shard_dim}"
                )
            of_unit.append(sharded)
        result.append(of_unit)
    if there:
        raise PlanError(f"parameter {min(next(iter(there)))} is in no unit of the next plan")
    return result


def switch(applied: Applied, plan, ties: Ties = (), same_units: bool = False) -> None:
    """From the step that begins on, the model follows `plan`, which has the first of each tie as the second.
    Collective. Parameters, gradients and optimizers stay the same objects. same_units: what the user has set holds for
    them. PlanError, before anything has changed, for a plan of other parameters."""
    if applied.flat_units():
        raise PlanError("a plan of flat parameters is not exchanged")
    shards = _regrouped(plan, applied.plan, applied.shards, ties)

    def make_groups() -> tuple:
        return [
            mesh_of_unit(plan, unit, applied.model, applied.mesh, applied.given) for unit in plan.units
        ], process_groups(plan, applied.mesh, applied.given.values(), applied.made_groups, applied.timeout_s)

    meshes, groups = connect(make_groups, applied.timeout_s)
    runtime = make_runtime(plan, applied.mesh, applied.device, groups, applied.memory, applied.timeout_s)
    step, replans = applied.runtime.step, applied.following.replans
    applied.runtime.restart()
    applied.unhook()
    applied.restore_forwards()
    for module in applied.model.modules():
        vars(module).pop(UNIT_ATTRIBUTE, None)
    applied.exchange(plan, meshes, groups, runtime, shards, same_units)
    for number, (unit, sharded) in enumerate(zip(plan.units, shards)):
        supply_shards(runtime, number, unit, sharded)
    applied.replace_forwards()
    applied.start()
    runtime.step = step
    if replans:
        applied.following.fall_back_on_deviation()
    give_methods(applied)
