# SPDX-License-Identifier: Apache-2.0
"""apply(): shards a model's parameters as its plan says and hooks the plan's replay into forward and backward."""

from __future__ import annotations

import contextlib
import datetime
import os
import warnings
import weakref

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from . import _flat, _fsdp_module, _optimizers, _out_of_memory
from ._agree import agree
from ._applied import ATTRIBUTE, Applied
from ._choices import Memory, OnDeviation, check_choice
from ._errors import PlanError
from ._fit import ModelParameter, check_model, check_placement, modules_of, parameters_of, untied
from ._flat_checkpoint import support_checkpoints
from ._flat_state_dict import hook_state_dicts, unhook_state_dicts
from ._init import Initialize, Source, reset_parameters
from ._kept_plans import KeptPlans
from ._mesh import data_parallel_mesh, process_groups, resolve_mesh
from ._native import native
from ._offload import offload
from ._peers import connect, peers, seconds
from ._precision import matches, rule_of, torch_dtype
from ._recompute import recompute
from ._runtime import make_runtime, supply_shards
from ._shard import ShardedParameter, shard_parameter


def load_plan(path: str | os.PathLike) -> native.Plan:
    """Reads and validates a plan document. Raises PlanError with the file, the place in it, found and expected."""
    try:
        return native.read_plan(os.fspath(path))
    except ValueError as error:
        raise PlanError(str(error)) from None


def check_for_use(plan, verify: bool) -> None:
    """Raises PlanError, in the verifier's words, for a plan that is not to be followed."""
    if not verify:
        warnings.warn("shardplan: the plan is not verified (verify=False)", stacklevel=3)
        return
    try:
        faults = native.check_plan_for_use(plan)
    except ValueError as error:
        raise PlanError(str(error)) from None
    for fault in faults:
        warnings.warn(f"shardplan: the plan has a fault because PyTorch has it: {fault}", stacklevel=3)


def check_release(plan) -> None:
    """A plan of another release than the installed one is followed all the same: the hooks fire as the plan's release has it."""
    installed = ".".join(torch.__version__.split(".")[:2])
    if plan.pytorch in (None, installed):
        return
    warnings.warn(
        f"shardplan: the plan follows FSDP of PyTorch {plan.pytorch}, and PyTorch {installed} is installed: schedule, memory and "
        f"numbers will be those of {plan.pytorch} (a strategy's `pytorch` names the release)",
        stacklevel=3,
    )


def mesh_of_unit(plan, unit, model: nn.Module, mesh: DeviceMesh) -> tuple[DeviceMesh, bool]:
    """What data_parallel_mesh gives for the unit."""
    rule = rule_of(plan, unit.modules[0], modules_of(model)[unit.modules[0]])
    own = rule.parameter_meshes if rule is not None else []
    names = [name for p in unit.parameters[:1] for name in (p.fqn, *p.shared_with)]  # all parameters of the unit are on one mesh
    placed = next((m.data_parallel for m in own if any(matches(pattern, name, model) for pattern in m.parameters for name in names)), None)
    return data_parallel_mesh(plan, placed or rule and rule.data_parallel or plan.data_parallel, mesh)


def _shard_unit(plan, unit_id: int, by_fqn: dict[str, ModelParameter], own_mesh: tuple[DeviceMesh, bool]) -> list[ShardedParameter]:
    """Replaces the unit's parameters by their shards."""
    unit = plan.units[unit_id]
    host = plan.shards_on_host(unit_id)
    sharded = [shard_parameter(by_fqn[p.fqn].parameter, *own_mesh, p.shard_dim, host) for p in unit.parameters]
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
            shards.append(_flat.FlatUnit(runtime, i, plan, by_fqn, groups))
        else:
            shards.append(_shard_unit(plan, i, by_fqn, meshes[i]))
            supply_shards(runtime, i, unit, shards[i])
    source.prepare([module for module in model.modules() if id(module) not in prepared])
    return shards


def _guard_state_dict(model: nn.Module, applied: Applied) -> None:
    """Between a forward and its backward some modules hold whole parameters: shards are saved all the same, not loaded."""

    def check(*_args, **_kwargs) -> None:
        if not applied.runtime.between_steps:
            raise RuntimeError(
                "shardplan: load_state_dict works between steps only; a forward has run whose backward has not finished "
                "(shardplan.torch.abandon_step gives its step up)"
            )

    def show(*_args, **_kwargs) -> None:
        """The shards are valid at any time; the modules of gathered units hold whole parameters instead."""
        if applied.flat_units() and not applied.runtime.between_steps:
            raise RuntimeError(
                "shardplan: state_dict of flat parameters works between steps only; a forward has run whose backward has not "
                "finished (shardplan.torch.abandon_step gives its step up)"
            )
        applied.runtime.show_shards(True)

    def hide(*_args, **_kwargs) -> None:
        applied.runtime.show_shards(False)

    applied.guards += [
        model.register_state_dict_pre_hook(show),
        model.register_state_dict_post_hook(hide),
        model.register_load_state_dict_pre_hook(check),
    ]


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
    "replan": a warning that says where; the step is finished on demand, slowly, and the next one follows a plan made of what
    this one did. Ranks that deviate otherwise than others: docs/reference/python.md. Plans are kept: one is made for each way that steps go.
    memory: of what is gathered and reduced. "allocator": PyTorch's caching allocator. "arena": one block, every buffer at an
    address of its own (on GPUs NCCL's memory, registered with its communicators).
    broadcast_from_rank_0: parameters and buffers of the mesh's first rank count, whatever the others hold.
    plan: a plan document's path, or what load_plan returned. What its strategy recomputes runs under PyTorch's
    checkpoint, unless the model has wrappers for that already.
    timeout: seconds after which a collective of the plan, on any communicator, has failed, and after which ranks that do not
    come to this call are given up. None: the default process group's (init_process_group).
    verify: whether the plan is verified first. A plan that does what PyTorch itself does wrong warns; any other that does not
    verify raises. False: it is followed as it is, with a warning.
    mesh: ranks in the plan's arrangement; None: all ranks of the default process group.

    Parameters become DTensors, Shard(0) over FSDP's dimension of the mesh, laid out as FSDP2 lays them out: optimizers,
    gradient clipping and torch.distributed.checkpoint work on them. Create the optimizer after this call.

    Raises PlanError (a RuntimeError) when the plan cannot be read, does not verify (naming rule and place), was made for
    another model (naming the parameter, what was expected and what was found) or for other ranks, or when ranks differ in
    plan, model or version (naming them). RuntimeError for a step that deviates names the first point
    that differs, found and expected.
    """
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
        resolved = resolve_mesh(plan, mesh, device)
        meshes = [mesh_of_unit(plan, unit, model, resolved) for unit in plan.units]
        return resolved, meshes, process_groups(plan, resolved, made_groups, timeout_s)  # those of flattened meshes, too

    mesh, meshes, groups = connect(make_groups, timeout_s)
    runtime = make_runtime(plan, mesh, device, groups, memory, timeout_s)
    replaced = {id(found.parameter): weakref.ref(found.parameter) for found in by_fqn.values()}
    source = Source(by_fqn, mesh, device, initialize, broadcast_from_rank_0)
    shards = _shard_all(runtime, plan, model, by_fqn, meshes, source, groups)
    applied = Applied(
        model, plan, mesh, meshes, device, groups, made_groups, runtime, by_fqn, shards, memory, timeout_s
    )
    if not applied.flat_units():  # whose original parameters stay the user's
        applied.replaced = replaced
    applied.undo_recompute = recompute(plan, model)
    applied.undo_offload = offload(plan, model, device, runtime)
    applied.start()
    if flat := applied.flat_units():
        _flat.remember(model, flat)
        hook_state_dicts(model, flat, mesh)
        support_checkpoints(flat)
        undo_casts = _flat.cast_buffers(plan, model)
        applied.undo += [lambda: _flat.forget(model), lambda: unhook_state_dicts(model), undo_casts]
    applied.following = KeptPlans(applied)
    if on_deviation == "replan":
        applied.following.fall_back_on_deviation()
    _guard_state_dict(model, applied)
    object.__setattr__(model, ATTRIBUTE, applied)
    _fsdp_module.give_methods(applied)
    _optimizers.watch(applied)
    _out_of_memory.watch(applied)
    return model
