# SPDX-License-Identifier: Apache-2.0
"""apply(): shards a model's parameters as its plan says and hooks the plan's replay into forward and backward.
remove(): the reverse."""

from __future__ import annotations

import contextlib
import datetime
import os
import weakref
from collections.abc import Callable

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from .._calls.fsdp_module import give_methods, take_methods
from .._calls.setters import setters_of
from .._calls.summon import whole_copy
from .._checkpoints.flat_checkpoint import support_checkpoints
from .._checkpoints.flat_state_dict import hook_state_dicts, unhook_state_dicts
from .._job.agree import agree
from .._job.arguments import Memory, OnDeviation, PlanError, check_choice, seconds
from .._job.mesh import Given, OwnMesh, process_groups, resolve_mesh
from .._job.native import native
from .._job.peers import connect, peers
from .._model.fit import ModelParameter, check_model, check_placement, parameters_of, untied
from .._model.init import Initialize, Source, reset_parameters
from .._model.skeleton import Skeleton
from .._parameters.flat import FlatUnit, cast_buffers, forget, remember
from .._parameters.flat_whole import gather
from .._parameters.rules import mesh_of_unit, torch_dtype
from .._parameters.shard import ShardedParameter, shard_parameter
from .._plans.documents import check_for_use, check_release, load_plan
from .._replay import memory as device_memory
from .._replay import optimizers
from .._replay.applied import ATTRIBUTE, UNIT_ATTRIBUTE, Applied, applied_to
from .._replay.kept_plans import KeptPlans
from .._replay.runtime import make_runtime, supply_shards


def _shard_unit(
    plan, unit_id: int, by_fqn: dict[str, ModelParameter], own_mesh: OwnMesh
) -> list[ShardedParameter]:
    """Replaces the unit's parameters by their shards."""
    unit = plan.units[unit_id]
    host = plan.shards_on_host(unit_id)
    sharded = [shard_parameter(p.fqn, by_fqn[p.fqn].parameter, own_mesh, p.shard_dim, host) for p in unit.parameters]
    for expected, made in zip(unit.parameters, sharded):
        if expected.grad_dtype is not None:
            made.shard.grad_dtype = torch_dtype(expected.grad_dtype)
    for expected, result in zip(unit.parameters, sharded):
        found = by_fqn[expected.fqn]
        for slot in found.slots:
            slot.module.register_parameter(slot.name, result.shard)
        found.parameter = result.shard  # the whole one goes
    return sharded


def _shard_all(runtime, plan, model, by_fqn, meshes: list, source: Source, groups: list) -> list:
    """Unit by unit: values come to be, this rank's part of them stays."""
    shards = []
    prepared: set[int] = set()
    for i, unit in enumerate(plan.units):
        holders = {id(s.module): s.module for p in unit.parameters for s in by_fqn[p.fqn].slots}
        source.prepare([module for key, module in holders.items() if key not in prepared])
        prepared |= holders.keys()
        if unit.flat:
            shards.append(FlatUnit(runtime, i, plan, by_fqn, groups))
        else:
            shards.append(_shard_unit(plan, i, by_fqn, meshes[i]))
            supply_shards(runtime, i, unit, shards[i])
    source.prepare([module for module in model.modules() if id(module) not in prepared])
    return shards


def _guard_state_dict(model: nn.Module, applied: Applied) -> None:
    """Between a forward and its backward some modules hold whole parameters: shards are saved all the same, not
    loaded."""

    def check(*_args, **_kwargs) -> None:
        if not applied.runtime.between_steps:
            raise RuntimeError(
                "shardplan: load_state_dict works between steps only; a forward has run whose backward has not "
                "finished "
                "(shardplan.torch.abandon_step gives its step up)"
            )

    def show(*_args, **_kwargs) -> None:
        """The shards are valid at any time; the modules of gathered units hold whole parameters instead."""
        if applied.flat_units() and not applied.runtime.between_steps:
            raise RuntimeError(
                "shardplan: state_dict of flat parameters works between steps only; a forward has run whose backward "
                "has not "
                "finished (shardplan.torch.abandon_step gives its step up)"
            )
        applied.runtime.show_shards(True)

    def hide(*_args, **_kwargs) -> None:
        applied.runtime.show_shards(False)

    handles = [
        model.register_state_dict_pre_hook(show),
        model.register_state_dict_post_hook(hide),
        model.register_load_state_dict_pre_hook(check),
    ]
    applied.at_removal.extend(handle.remove for handle in handles)


def apply(
    model: nn.Module,
    plan: str | os.PathLike | native.Plan,
    mesh: DeviceMesh | None = None,
    *,
    initialize: Initialize = reset_parameters,
    broadcast_from_rank_0: bool = False,
    on_deviation: OnDeviation = "stop",
    memory: Memory = "allocator",
    verify: bool = True,
    timeout: float | datetime.timedelta | None = None,
) -> nn.Module:
    """Makes `model` train by replaying `plan`; returns the same module.

    model: whole parameters, the same on all ranks (this rank keeps its slices), or parameters on the meta device.
    initialize: fills the parameters and buffers of one module (not of its children) that was on the meta device. A unit
    comes to be, is sharded and goes before the next one comes.
    on_deviation: what happens in a step that does not pass the plan's points. "stop": RuntimeError where it deviates.
    "replan": a warning that says where; the step is finished on demand, slowly, and the next one follows a plan made of
    what this one did. Ranks that deviate otherwise than others: docs/reference/python.md. Plans are kept: one is made
    for each way that steps go.
    memory: of what is gathered and reduced. "allocator": PyTorch's caching allocator. "arena": one block, every buffer
    at an address of its own (on GPUs NCCL's memory, registered with its communicators).
    broadcast_from_rank_0: parameters and buffers of the mesh's first rank count, whatever the others hold.
    plan: a plan document's path, or what load_plan returned. Modules that its strategy recomputes run under PyTorch's
    checkpoint, unless the model has wrappers for that already.
    timeout: seconds after which a collective of the plan, on any communicator, has failed, and after which ranks that
    do not come to this call are given up. None: the default process group's (init_process_group).
    verify: whether the plan is verified first. A plan that does what PyTorch itself does wrong warns; any other that
    does not verify raises. False: it is followed as it is, with a warning.
    mesh: ranks in the plan's arrangement; None: all ranks of the default process group.

    Parameters become DTensors, Shard(0) over FSDP's dimension of the mesh, laid out as FSDP2 lays them out: optimizers,
    gradient clipping and torch.distributed.checkpoint work on them. Create the optimizer after this call.

    Raises PlanError (a RuntimeError) when the plan cannot be read or does not verify (naming rule and place). The same
    for a plan of another model (naming the parameter, expected and found) or of other ranks, and for ranks that differ
    in plan, model or version (naming them). RuntimeError for a step that deviates names the first point that differs,
    found and expected.
    """
    apply_plan(
        model,
        plan,
        mesh,
        initialize=initialize,
        broadcast_from_rank_0=broadcast_from_rank_0,
        on_deviation=on_deviation,
        memory=memory,
        verify=verify,
        timeout=timeout,
    )
    return model


def apply_plan(
    model: nn.Module,
    plan: str | os.PathLike | native.Plan,
    mesh: DeviceMesh | None,
    *,
    initialize: Initialize,
    broadcast_from_rank_0: bool,
    on_deviation: OnDeviation,
    memory: Memory,
    timeout: float | datetime.timedelta | None,
    verify: bool = True,
    skeleton: Skeleton | None = None,
    given: Callable[[], Given] = dict,
) -> Applied:
    """The work of apply(), for auto(), too. skeleton: of the model of auto(). given: makes the meshes that the user's
    calls name, all ranks together."""
    check_choice("on_deviation", on_deviation, OnDeviation)
    check_choice("memory", memory, Memory)
    if hasattr(model, ATTRIBUTE):
        raise PlanError("a plan is applied to this model already")
    timeout_s = seconds(timeout)
    peers()  # are watched from here on
    try:
        if not isinstance(plan, native.Plan):
            plan = load_plan(plan)
        check_for_use(plan, verify)
        check_release(plan)
        by_fqn = untied(plan, parameters_of(model))
        check_model(plan, model, by_fqn)
        device = check_placement(by_fqn, mesh)
    except Exception as error:
        with contextlib.suppress(PlanError):
            agree(model, None, mesh, timeout_s, failure=str(error) or type(error).__name__)
        raise
    agree(model, plan, mesh, timeout_s)
    made_groups: dict = {}

    def make_groups() -> tuple:
        resolved, own = resolve_mesh(plan, mesh, device), given()
        meshes = [mesh_of_unit(plan, unit, model, resolved, own) for unit in plan.units]
        # Groups of flattened meshes, too.
        return resolved, own, meshes, process_groups(plan, resolved, own.values(), made_groups, timeout_s)

    mesh, of_user, meshes, groups = connect(make_groups, timeout_s)
    runtime = make_runtime(plan, mesh, device, groups, memory, timeout_s)
    replaced = {id(found.parameter): weakref.ref(found.parameter) for found in by_fqn.values()}
    source = Source(by_fqn, mesh, device, initialize, broadcast_from_rank_0)
    shards = _shard_all(runtime, plan, model, by_fqn, meshes, source, groups)
    if any(unit.flat for unit in plan.units):  # the original parameters stay the user's
        replaced = {}
    applied = Applied(
        model,
        plan,
        mesh,
        of_user,
        meshes,
        device,
        groups,
        made_groups,
        runtime,
        by_fqn,
        shards,
        memory,
        timeout_s,
        replaced=replaced,
        skeleton=skeleton,
        make_following=KeptPlans,
        make_setters=setters_of,
    )
    applied.replace_forwards()
    applied.start()
    if flat := applied.flat_units():
        remember(model, flat)
        hook_state_dicts(model, flat, mesh)
        support_checkpoints(flat)
        undo_casts = cast_buffers(plan, model)
        applied.at_removal.extend([lambda: forget(model), lambda: unhook_state_dicts(model), undo_casts])
    if on_deviation == "replan":
        applied.following.fall_back_on_deviation()
    _guard_state_dict(model, applied)
    object.__setattr__(model, ATTRIBUTE, applied)
    give_methods(applied)
    optimizers.watch(applied)
    device_memory.watch(applied)
    return applied


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
    """Takes the plan off the model: its parameters are whole again, plain tensors on the device, without gradients;
    hooks and methods are gone. A step under way is given up. Optimizers made for the shards no longer fit. Collective.
    Returns the model."""
    applied = applied_to(model)
    if not applied.runtime.between_steps:
        applied.runtime.abandon()
    if any(expected.gathered for unit in applied.plan.units for expected in unit.parameters):
        raise PlanError("a plan with all-gather extensions is not taken off a model")
    _make_whole(applied)
    applied.unhook()
    optimizers.forget(applied)
    take_methods(model)
    for module in model.modules():
        vars(module).pop(UNIT_ATTRIBUTE, None)
    vars(model).pop(ATTRIBUTE)
    applied.restore_forwards()
    for undo in applied.at_removal:
        undo()
    return model
