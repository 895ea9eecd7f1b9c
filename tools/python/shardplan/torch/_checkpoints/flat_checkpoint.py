# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint of models with flat units.

torch.distributed.checkpoint.state_dict knows flat parameters by the class that FSDP1 puts around a module. It has no
hook for others, and would save one rank's slice of the optimizer's state for all of it. `_install()` puts a function
around those of its functions that see the model; a model without flat units passes through. Saved tensors have the
names and shapes of the original parameters, so FSDP1, FSDP2 and plans of both layouts load them.

An optimizer's own state_dict() has this rank's slices. One can be saved by each rank for itself;
torch.distributed.checkpoint, which would keep one rank's for all, is refused (RankSlice).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dsd
import torch.nn as nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._job.arguments import StateDictKind
from .._model.fit import trace_fqn
from .._parameters.flat import FlatUnit, flat_units
from .flat_optimizer import Held, State, original_state, slice_of_state
from .flat_state_dict import chunk, state_dict_type

_MARK = "_shardplan_rank_slice"  # of parameters whose data is this rank's slice: the parameter's name


def held_in(model: nn.Module) -> list[Held]:
    """The flat units of all applied plans in `model`, by the names that parameters have in it."""
    found = []
    for prefix, module in model.named_modules():
        for flat in flat_units(module):
            names = [trace_fqn(".".join(filter(None, (prefix, expected.fqn)))) for expected in flat.unit.parameters]
            found.append(Held(flat, names))
    return [held for held in found if held.names and held.flat.visible]


@contextlib.contextmanager
def _state_dicts(model: nn.Module, kind: StateDictKind) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if flat_units(module):
                stack.enter_context(state_dict_type(module, kind))
        yield


def names_by_parameter(model: nn.Module, all_held: list[Held]) -> dict[nn.Parameter, list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters():
        names[parameter] = [trace_fqn(name)]
    for held in all_held:
        for parameter, _, _ in held.slices():
            names[parameter] = held.names_of(parameter)
    return names


# ---- the optimizer's state ----


def _kept_whole(whole: torch.Tensor, _flat: FlatUnit) -> torch.Tensor:
    return whole.clone()


def kept_sharded(whole: torch.Tensor, flat: FlatUnit) -> torch.Tensor:
    return whole.clone() if flat.ranks == 1 or whole.dim() == 0 else chunk(whole, flat.mesh)


def _state_of(model: nn.Module, optimizer: torch.optim.Optimizer, all_held: list[Held], full: bool) -> dict:
    """{"state": by original parameter, "param_groups": with names}. Collective."""
    dsd._init_optim_state(optimizer)
    names = names_by_parameter(model, all_held)
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    state: State = {}
    for held in all_held:
        if any(parameter in own for parameter, _, _ in held.slices()):
            state |= original_state(optimizer, held, _kept_whole if full else kept_sharded)
    sliced = {parameter for held in all_held for parameter, _, _ in held.slices()}
    for parameter in own - sliced:
        if parameter in optimizer.state:
            state[names[parameter][0]] = dict(optimizer.state[parameter])
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**options, "params": [name for parameter in group["params"] for name in names[parameter]]})
    return {"state": state, "param_groups": groups}


def _get(original: Callable, model: nn.Module, optimizers: tuple, info) -> dict:
    all_held = held_in(model)
    if not all_held or not info.handle_optim:
        return original(model, optimizers, info)
    found: dict = {"state": {}, "param_groups": []}
    for optimizer in optimizers:
        part = _state_of(model, optimizer, all_held, info.full_state_dict)
        found["state"].update(part["state"])
        found["param_groups"].extend(part["param_groups"])
    if info.flatten_optimizer_state_dict:
        found = dsd._flatten_optim_state_dict(found)
    return dsd._maybe_full_or_cpu_state_dict(found, info)


def _nested(state_dict: dict, names: list[str]) -> dict:
    """Undoes flatten_optimizer_state_dict."""
    if "state" in state_dict:
        return state_dict
    state: State = {name: {} for name in names}
    groups: dict[str, dict] = {name: {"params": [name]} for name in names}
    for key, value in state_dict.items():
        kind, _, rest = key.partition(".")
        name = max((name for name in names if rest.startswith(f"{name}.")), key=len, default=None)
        if name is not None:
            (state if kind == "state" else groups)[name][rest[len(name) + 1 :]] = value
    return {"state": {name: of for name, of in state.items() if of}, "param_groups": list(groups.values())}


def _with_options(group: dict, loaded: list[dict], names: list[str]) -> dict:
    """The group's options as they were saved."""
    saved = next((of for of in loaded if set(of["params"]) & set(names)), {})
    return {key: saved.get(key, value) for key, value in group.items() if key != "params"}


def _loadable(
    model: nn.Module, optimizer: torch.optim.Optimizer, all_held: list[Held], state_dict: dict, strict: bool
) -> dict:
    """The state dict for optimizer.load_state_dict on this rank. Collective."""
    by_parameter = names_by_parameter(model, all_held)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    nested = _nested(state_dict, [name for parameter in parameters for name in by_parameter[parameter]])
    saved: State = nested["state"]
    for parameter in parameters:
        missing = [name for name in by_parameter[parameter] if parameter.requires_grad and name not in saved]
        if missing and strict and optimizer.state:
            raise RuntimeError(
                f"shardplan: the optimizer's state of {missing[0]} is not in what is loaded (strict=False lets it be)"
            )
    position = {parameter: i for i, parameter in enumerate(parameters)}
    state: dict[int, dict] = {}
    sliced = set()
    for held in all_held:
        sliced |= {parameter for parameter, _, _ in held.slices()}
        if any(parameter in position for parameter, _, _ in held.slices()):
            state |= {position[parameter]: of for parameter, of in slice_of_state(held, saved) if parameter in position}
    for parameter in parameters:
        name = by_parameter[parameter][0]
        if parameter not in sliced and name in saved:
            state[position[parameter]] = saved[name]
    groups = []
    for group in optimizer.param_groups:
        names = [name for parameter in group["params"] for name in by_parameter[parameter]]
        options = _with_options(group, nested["param_groups"], names)
        groups.append({**options, "params": [position[parameter] for parameter in group["params"]]})
    return {"state": state, "param_groups": groups}


def from_rank_0(state_dict: dict, device: torch.device) -> dict:
    """Broadcasts a nested dict of the first rank, tensor by tensor."""

    def walk(value, path: tuple, found: dict):
        if isinstance(value, torch.Tensor):
            found[path] = value
            return (value.shape, value.dtype)
        if isinstance(value, dict):
            return {key: walk(item, (*path, key), found) for key, item in value.items()}
        return value

    def filled(described, path: tuple):
        if isinstance(described, dict):
            return {key: filled(item, (*path, key)) for key, item in described.items()}
        if isinstance(described, tuple) and len(described) == 2 and isinstance(described[1], torch.dtype):
            tensor = torch.empty(described[0], dtype=described[1], device=device)
            if path in tensors:
                tensor.copy_(tensors[path])
            dist.broadcast(tensor, src=0)
            return tensor
        return described

    tensors: dict[tuple, torch.Tensor] = {}
    described = [walk(state_dict, (), tensors) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(described, src=0)
    return filled(described[0], ())


def _load(original: Callable, model: nn.Module, optimizers: tuple, state_dict: dict, info) -> None:
    all_held = held_in(model)
    if not all_held or not info.handle_optim:
        return original(model, optimizers, state_dict, info)
    if info.broadcast_from_rank0:
        state_dict = from_rank_0(state_dict, all_held[0].flat.shard.device)
    for optimizer in optimizers:
        dsd._init_optim_state(optimizer)
        loadable = _loadable(model, optimizer, all_held, state_dict, info.strict)
        dsd._state_dict_fn(optimizer, "load_state_dict")(state_dict=loadable)
    return None


# ---- the model's ----


def _get_model(original: Callable, model: nn.Module, info) -> dict:
    all_held = held_in(model)
    if not all_held:
        return original(model, info)
    with _state_dicts(model, "full" if info.full_state_dict else "sharded"):
        state_dict = original(model, dataclasses.replace(info, ignore_frozen_params=False))
    if info.ignore_frozen_params:
        for parameter, names in names_by_parameter(model, all_held).items():
            for name in names if not parameter.requires_grad else ():
                state_dict.pop(name, None)
    return state_dict


def _load_model(original: Callable, model: nn.Module, state_dict: dict, info):
    all_held = held_in(model) if info.handle_model else []
    if not all_held:
        return original(model, state_dict, info)
    if info.broadcast_from_rank0:
        state_dict = from_rank_0(state_dict, all_held[0].flat.shard.device)
    return dsd._state_dict_fn(model, "load_state_dict")(state_dict=dict(state_dict), strict=info.strict)


# ---- an optimizer's own state_dict ----


class RankSlice(torch.Tensor):
    """A tensor that torch.distributed.checkpoint does not save or load; else as any."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __reduce_ex__(self, protocol):
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return self.as_subclass(torch.Tensor).detach().clone()

    def _refuse(self, *_args):
        raise RuntimeError(
            f"shardplan: the optimizer's state of {getattr(self, _MARK)} is this rank's slice of a flat parameter: "
            "torch.distributed.checkpoint would keep one rank's for all. Save and load what "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer) gives "
            "(optimizer.state_dict() can be saved by each rank for itself, with torch.save)"
        )

    __create_write_items__ = __create_chunk_list__ = __get_tensor_shard__ = _refuse


def _marked(value: torch.Tensor, name: str) -> RankSlice:
    marked = value.detach().as_subclass(RankSlice)
    setattr(marked, _MARK, name)
    return marked


def _mark_state(optimizer: torch.optim.Optimizer, state_dict: dict) -> dict:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = dict(state_dict["state"])
    for key, parameter in enumerate(parameters):
        name = getattr(parameter, _MARK, None)
        if name is None or key not in state:
            continue
        cut = {k: v for k, v in state[key].items() if isinstance(v, torch.Tensor) and v.dim() > 0}
        state[key] = {**state[key], **{k: _marked(v, name) for k, v in cut.items()}}
    return {**state_dict, "state": state}


def _unmark_state(_optimizer: torch.optim.Optimizer, state_dict: dict) -> dict:
    def plain(value):
        return value.as_subclass(torch.Tensor) if isinstance(value, RankSlice) else value

    state = {
        key: {k: plain(v) for k, v in of.items()} if isinstance(of, dict) else of
        for key, of in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


_watched: weakref.WeakSet = weakref.WeakSet()  # optimizers


def _watch(optimizer: torch.optim.Optimizer, *_args) -> None:
    """After a step of any optimizer: there is a state now."""
    if optimizer in _watched:
        return
    _watched.add(optimizer)
    if any(hasattr(parameter, _MARK) for group in optimizer.param_groups for parameter in group["params"]):
        optimizer.register_state_dict_post_hook(_mark_state)
        optimizer.register_load_state_dict_pre_hook(_unmark_state)


def support_checkpoints(units: list[FlatUnit]) -> None:
    _install()
    for flat in units:
        for i, parameter in enumerate(flat.visible):
            if flat.ranks > 1:
                setattr(
                    parameter,
                    _MARK,
                    flat.unit.parameters[i].fqn if flat.original else f"unit {flat.unit.fqn or 'of the root'}",
                )


@functools.cache
def _install() -> None:
    """Once in a process."""
    for name, around in (
        ("_get_optim_state_dict", _get),
        ("_load_optim_state_dict", _load),
        ("_get_model_state_dict", _get_model),
        ("_load_model_state_dict", _load_model),
    ):
        original = getattr(dsd, name)
        setattr(dsd, name, functools.wraps(original)(functools.partial(around, original)))
    register_optimizer_step_post_hook(_watch)
