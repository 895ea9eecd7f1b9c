"""apply(): shards a model's parameters as its plan says and hooks the plan's replay into forward and backward."""

from __future__ import annotations

import os

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from ._errors import PlanError
from ._fit import ModelParameter, check_model, check_placement, parameters_of
from ._mesh import mesh_rank, process_groups, resolve_mesh, side_channel, timeout_s
from ._native import native
from ._precision import casts_of
from ._shard import as_dtensor, shard_parameter

_ATTRIBUTE = "_shardplan_runtime"


def load_plan(path: str | os.PathLike) -> native.Plan:
    """Reads and validates a plan document. Raises PlanError with the file, the place in it, found and expected."""
    try:
        return native.read_plan(os.fspath(path))
    except ValueError as error:
        raise PlanError(str(error)) from None


def _check_supported(plan) -> None:
    for unit in plan.units:
        name = unit.fqn or "the root"
        if unit.flat:
            raise PlanError(
                f"unit {name} has a flat layout (policy {plan.policy}), which shardplan.torch does not replay: "
                "plan with policy fsdp2"
            )
        for parameter in unit.parameters:
            if parameter.shard_dim != 0:
                raise PlanError(f"parameter {parameter.fqn}: sharded on dim {parameter.shard_dim}, only 0 is supported")


def _fast_slot(module: nn.Module) -> bool:
    """May a parameter be swapped in module._parameters, without the class's own __setattr__ (RNNs have one)?"""
    return type(module).__setattr__ is nn.Module.__setattr__


def _grad_maker(mesh: DeviceMesh, shape: torch.Size):
    return lambda local: as_dtensor(local, mesh, shape)


def _shard_unit(runtime, unit_id: int, unit, by_fqn: dict[str, ModelParameter], mesh: DeviceMesh) -> list[nn.Parameter]:
    """Replaces the unit's parameters by their shards, which become the plan's param_sharded buffer."""
    sharded = [shard_parameter(by_fqn[expected.fqn].parameter, mesh) for expected in unit.parameters]
    for expected, result in zip(unit.parameters, sharded):
        for slot in by_fqn[expected.fqn].slots:
            slot.module.register_parameter(slot.name, result.shard)
    runtime.set_shards(unit_id, [result.padded for result in sharded])
    return [result.shard for result in sharded]


def _add_parameters(runtime, unit_id: int, unit, by_fqn: dict[str, ModelParameter], shards, mesh: DeviceMesh) -> None:
    for index, (expected, shard) in enumerate(zip(unit.parameters, shards)):
        unsharded = nn.Parameter(runtime.unsharded_view(unit_id, index), requires_grad=shard.requires_grad)
        slots = [
            (slot.module, slot.module._parameters, slot.name, _fast_slot(slot.module))
            for slot in by_fqn[expected.fqn].slots
        ]
        runtime.add_parameter(unit_id, shard, unsharded, slots, _grad_maker(mesh, shard.shape))


def _make_runtime(plan, mesh: DeviceMesh, device: torch.device):
    groups = process_groups(plan, mesh)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return native.Runtime(plan, mesh_rank(mesh), device, groups, side_channel(), timeout_s(mesh))


def _hook_unit(runtime, unit: int, modules: list[nn.Module], casts) -> None:
    pre_forward, post_forward = runtime.hooks(unit, len(modules), *casts)
    for module in modules:
        module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(post_forward, always_call=len(modules) > 1)


def _hook_modules(plan, model: nn.Module, runtime) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    for unit_id, unit in enumerate(plan.units):
        of_unit = [modules[fqn] for fqn in unit.modules]
        _hook_unit(runtime, unit_id, of_unit, casts_of(plan, unit.modules[0], of_unit[0]))
    if not any("" in unit.modules for unit in plan.units):
        # A root without parameters of its own is no unit, yet it casts inputs and outputs.
        casts = casts_of(plan, "", model)
        if casts != (None, None):
            _hook_unit(runtime, -1, [model], casts)


def _guard_state_dict(model: nn.Module, runtime) -> None:
    """Between a forward and its backward some modules hold whole parameters: not a state to save or load."""

    def check(*_args, **_kwargs) -> None:
        if not runtime.between_steps:
            raise RuntimeError(
                "shardplan: state_dict and load_state_dict work between steps only; a forward has run whose backward "
                "has not finished"
            )

    model.register_state_dict_pre_hook(check)
    model.register_load_state_dict_pre_hook(check)


def apply(model: nn.Module, plan: str | os.PathLike | native.Plan, mesh: DeviceMesh | None = None) -> nn.Module:
    """Makes `model` train by replaying `plan`; returns the same module.

    model: whole parameters, materialised on the device and the same on all ranks (this rank keeps its slices).
    plan: a plan document's path, or what load_plan returned.
    mesh: ranks in the plan's arrangement; None: all ranks of the default process group.

    Parameters become DTensors, Shard(0) over the mesh's last dimension, laid out as FSDP2 lays them out: optimizers,
    gradient clipping and torch.distributed.checkpoint work on them. Create the optimizer after this call.

    Raises PlanError (a RuntimeError) when the plan cannot be read, was made for another model (naming the parameter,
    what was expected and what was found) or for other ranks. A step that deviates from the plan raises RuntimeError
    in the forward or backward where it does, naming the first trigger that differs.
    """
    if hasattr(model, _ATTRIBUTE):
        raise PlanError("a plan is applied to this model already")
    if not isinstance(plan, native.Plan):
        plan = load_plan(plan)
    _check_supported(plan)
    by_fqn = parameters_of(model)
    check_model(plan, model, by_fqn)
    device = check_placement(model, by_fqn)
    mesh = resolve_mesh(plan, mesh, device)
    runtime = _make_runtime(plan, mesh, device)
    shards = [_shard_unit(runtime, i, unit, by_fqn, mesh) for i, unit in enumerate(plan.units)]
    runtime.start()
    for i, unit in enumerate(plan.units):
        _add_parameters(runtime, i, unit, by_fqn, shards[i], mesh)
    _hook_modules(plan, model, runtime)
    _guard_state_dict(model, runtime)
    object.__setattr__(model, _ATTRIBUTE, runtime)
    return model
