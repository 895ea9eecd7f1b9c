# SPDX-License-Identifier: Apache-2.0
"""Inputs of a runtime of the C++ module: shards, parameters, extensions, and the hooks that pass it the model's
points."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from .._job.mesh import mesh_rank, side_channel
from .._job.native import native
from .._job.peers import peers
from .._model.fit import ModelParameter, modules_of
from .._parameters.extension import ExtendedParameter
from .._parameters.flat import fast_slot
from .._parameters.rules import casts_of, precision_of, torch_dtype
from .._parameters.shard import ShardedParameter, adopt_parameter, as_dtensor, gradient_unwrapper, whole_parameter


def make_runtime(plan, mesh: DeviceMesh, device: torch.device, groups: list, memory: str, timeout: float):
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    ranks = mesh.mesh.flatten().tolist()
    return native.Runtime(
        plan, mesh_rank(mesh), device, groups, side_channel(), peers(), ranks, timeout, memory == "arena"
    )


def supply_shards(runtime, unit_id: int, unit, sharded: list[ShardedParameter]) -> None:
    """Gives the runtime the tensors to gather. A parameter with an extension gathers the extension's tensors: one like
    the shard is put in the shard's place."""

    def part(expected, result: ShardedParameter) -> torch.Tensor:
        if not expected.gathered:
            return result.padded
        like_the_shard = [(t.dtype, t.numel) for t in expected.gathered] == [(expected.dtype, result.padded.numel())]
        dtype = torch_dtype(expected.dtype)
        return torch.empty(result.padded.numel() if like_the_shard else 0, dtype=dtype, device=result.padded.device)

    runtime.set_shards(unit_id, [part(*both) for both in zip(unit.parameters, sharded)])


def _grad_maker(spec):
    return lambda local: as_dtensor(local, spec)


def adopter(plan, shards: list):
    """The function that is called when a module holds another sharded parameter than ours."""

    def adopt(unit: int, parameter: int, found) -> None:
        adopt_parameter(plan.units[unit].parameters[parameter], shards[unit][parameter], found)

    return adopt


def add_extensions(
    runtime, plan, unit_id: int, by_fqn: dict[str, ModelParameter], sharded, own: DeviceMesh, model
) -> None:
    unit = plan.units[unit_id]
    if not any(expected.gathered for expected in unit.parameters):
        return
    shard_mesh = own if own.ndim == 1 else own[own.mesh_dim_names[-1]]
    precision = precision_of(plan, unit.modules[0], modules_of(model)[unit.modules[0]])
    for index, (expected, result) in enumerate(zip(unit.parameters, sharded)):
        if not expected.gathered:
            continue
        holder = by_fqn[expected.fqn].slots[0].module
        extension = ExtendedParameter(expected, result, holder, shard_mesh, precision)
        runtime.add_extension(unit_id, index, extension.inputs, extension.finish)


def add_parameters(runtime, unit_id: int, unit, by_fqn: dict[str, ModelParameter], sharded) -> None:
    for index, (expected, result) in enumerate(zip(unit.parameters, sharded)):
        view = torch.empty(0) if expected.gathered else runtime.unsharded_view(unit_id, index)
        unsharded = whole_parameter(view, result)
        slots = [
            (slot.module, slot.module._parameters, slot.name, fast_slot(slot.module))
            for slot in by_fqn[expected.fqn].slots
        ]
        make_grad = _grad_maker(result.spec)
        runtime.add_parameter(unit_id, result.shard, unsharded, slots, make_grad, gradient_unwrapper(result))


_IN_A_GRAPH = (
    "a unit of a shardplan plan lies inside of a graph that is to be whole (fullgraph=True), and its parameters are "
    "gathered between graphs: compile "
    "each unit's module instead of the one around it, leave fullgraph out, or make the module around it the unit"
)


def _untraced(function: Callable) -> Callable:
    """`function` in a frame that torch.compile neither looks into nor warns of: it breaks its graph there, as at
    FSDP2's hooks."""

    def call(module: nn.Module, args: tuple, last: object) -> object:  # last: keyword arguments, or the output
        return function(module, args, last)

    frames = torch._C._dynamo.eval_frame  # of what is called in it, too; torch._dynamo itself takes seconds to import
    frames.set_code_exec_strategy(
        call.__code__, frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    )
    call._torchdynamo_disable = True
    call._torchdynamo_disable_msg = _IN_A_GRAPH
    return call


def _hook_unit(runtime, plan, unit: int, modules: list[nn.Module], casts, before_others: bool) -> tuple[list, Callable]:
    """Handles of the unit's hooks, and the one in front of its forward. before_others: its post-forward runs before
    that of hooks that are there."""
    pre_forward, post_forward = map(_untraced, runtime.hooks(unit, modules, *casts, plan.full_precision_in_eval))
    handles = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(post_forward, prepend=before_others, always_call=len(modules) > 1))
    return handles, pre_forward


def _last_groups_first(units) -> list[int]:
    order: list[int] = []
    for i, unit in enumerate(units):
        order.insert(len(order) - unit.parameter_group, i)
    return order


def hook_modules(plan, model: nn.Module, runtime) -> tuple[list, dict[int, Callable]]:
    """Handles of the hooks of all units, and by unit (-1: a root that is none) the one in front of its forward."""
    modules = modules_of(model)
    handles, pre_forwards = [], {}

    def hook(unit: int, of_unit: list[nn.Module], casts) -> None:
        several = (
            0 <= unit < len(plan.units) - 1 and plan.units[unit + 1].parameter_group > plan.units[unit].parameter_group
        )
        made, pre_forwards[unit] = _hook_unit(runtime, plan, unit, of_unit, casts, before_others=several)
        handles.extend(made)

    # Hooks of a module are called in the order of its parameter groups: what is registered last is in front.
    for unit_id in _last_groups_first(plan.units):
        unit = plan.units[unit_id]
        of_unit = [modules[fqn] for fqn in unit.modules]
        hook(unit_id, of_unit, casts_of(plan, unit.modules[0], of_unit[0]))
    if not any("" in unit.modules for unit in plan.units):
        # A root without parameters of its own is no unit, yet it casts inputs and outputs.
        casts = casts_of(plan, "", model)
        if casts != (None, None):
            hook(-1, [model], casts)
    return handles, pre_forwards
