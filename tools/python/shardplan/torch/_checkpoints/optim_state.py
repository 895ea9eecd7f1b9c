# SPDX-License-Identifier: Apache-2.0
"""Optimizer state dicts by FSDP1's names, for models of either layout.

Outside they are keyed by the names of the original parameters: whole tensors (full), or DTensors cut along dim 0
(sharded). An optimizer has this rank's part under positions. States are gathered and cut unit by unit: no rank has more
than one unit's whole beside what it is to keep.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .._parameters.flat import FlatUnit
from .flat_checkpoint import from_rank_0, held_in, kept_sharded, names_by_parameter
from .flat_optimizer import Held, State, original_state, slice_of_state
from .flat_state_dict import state_dict_kind

OptimInput = list[dict] | Iterable[nn.Parameter] | None


class OptimStateKeyType(enum.Enum):
    """Kinds of keys of an optimizer's state dict."""

    PARAM_NAME = enum.auto()
    PARAM_ID = enum.auto()


# ---- from the optimizer ----


def _elements(parameter: nn.Parameter) -> int:
    """On this rank."""
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


def _check_states(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, list[str]], group) -> None:
    """All ranks find that one of them lacks a state that another has. Collective."""
    if not dist.is_initialized():
        return
    has = {tuple(names[p]) for p in names if p in optimizer.state and optimizer.state[p]}
    lacks = {tuple(names[p]) for p in names if tuple(names[p]) not in has and _elements(p) > 0}
    of_ranks: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, (has, lacks), group=group)
    needed = set().union(*(found for found, _ in of_ranks))
    missing = {rank: sorted(lacking & needed) for rank, (_, lacking) in enumerate(of_ranks) if lacking & needed}
    if missing:
        said = [
            f"rank {rank} is missing the states of {', '.join(n for key in keys for n in key)}"
            for rank, keys in missing.items()
        ]
        raise RuntimeError(
            "shardplan: every rank has to have the optimizer states that any rank has: " + "; ".join(said)
        )


def _collected(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    of_flat: Callable[[torch.Tensor, FlatUnit], torch.Tensor],
    of_other: Callable,
    group,
) -> dict:
    all_held = held_in(model)
    names = names_by_parameter(model, all_held)
    _check_states(optimizer, names, group)
    own = {parameter for options in optimizer.param_groups for parameter in options["params"]}
    sliced = {parameter for held in all_held for parameter, _, _ in held.slices()}
    state: State = {}
    for held in all_held:
        if any(parameter in own for parameter, _, _ in held.slices()):
            state |= original_state(optimizer, held, of_flat)
    for parameter, (name, *_) in names.items():
        if parameter in own - sliced and optimizer.state.get(parameter):
            state[name] = {key: of_other(value) for key, value in optimizer.state[parameter].items()}
    groups = []
    for options in optimizer.param_groups:
        of_group = [name for parameter in options["params"] for name in names[parameter]]
        groups.append({**{k: v for k, v in options.items() if k != "params"}, "params": of_group})
    return {"state": state, "param_groups": groups}


def _on_host(state_dict: dict) -> dict:
    def moved(value: object) -> object:
        return value.detach().cpu() if isinstance(value, torch.Tensor) else value

    state = {name: {key: moved(value) for key, value in of.items()} for name, of in state_dict["state"].items()}
    return {**state_dict, "state": state}


def full_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, optim_input: OptimInput = None, rank0_only: bool = True, group=None
) -> dict:
    """The whole state in host memory, by the names of the original parameters; with rank0_only on the first rank, {} on
    the others. Collective. A rank that lacks a state which another has is an error on all, which names ranks and
    parameters."""
    del optim_input  # the optimizer itself says it
    keep = not rank0_only or not dist.is_initialized() or dist.get_rank(group) == 0

    def kept(whole: torch.Tensor, _flat: FlatUnit | None = None) -> torch.Tensor:
        return whole.detach().to("cpu", copy=True) if keep else whole.new_empty(0)

    def of_other(value: object) -> object:
        if isinstance(value, DTensor):
            return kept(value.full_tensor())
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    found = _collected(model, optim, kept, of_other, group)
    return _on_host(found) if keep else {}


def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group=None) -> dict:
    """The state by the names of the original parameters, as DTensors cut along dim 0 (those of fsdp2 as they are).
    Collective."""

    def of_other(value: object) -> object:
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    return _collected(model, optim, kept_sharded, of_other, group)


def optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: dict | None = None, group=None
) -> dict:
    """Whole on every rank, or sharded inside `state_dict_type(model, "sharded")`. optim_state_dict: what
    optim.state_dict() gave, in place of what the optimizer has now. Collective."""
    if optim_state_dict is not None:
        optim = _with_state(optim, optim_state_dict)
    if state_dict_kind(model) == "sharded":
        return sharded_optim_state_dict(model, optim, group)
    return full_optim_state_dict(model, optim, rank0_only=False, group=group)


def _with_state(optimizer: torch.optim.Optimizer, state_dict: dict):
    """The optimizer's parameters with the state and the options of a state dict of its own."""
    parameters = [parameter for options in optimizer.param_groups for parameter in options["params"]]
    state = {parameters[key]: of for key, of in state_dict["state"].items()}
    pairs = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    return types.SimpleNamespace(
        state=state, param_groups=[{**saved, "params": options["params"]} for options, saved in pairs]
    )


# ---- to the optimizer ----


def _parameter_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, optim_input: OptimInput
) -> list[list[nn.Parameter]]:
    if optimizer is not None and optim_input is None:
        return [list(options["params"]) for options in optimizer.param_groups]
    given = list(model.parameters() if optim_input is None else optim_input)
    if not given:
        raise ValueError("shardplan: optim_input is empty")
    if all(isinstance(of, dict) for of in given):
        return [list(options["params"]) for options in given]
    if not all(isinstance(of, torch.Tensor) for of in given):
        raise TypeError("shardplan: optim_input: expected parameters, or groups of parameters")
    return [given]


class _Target:
    """The parameters that an optimizer's positions stand for."""

    def __init__(self, model: nn.Module, groups: list[list[nn.Parameter]]) -> None:
        self.all_held = held_in(model)
        self.names = names_by_parameter(model, self.all_held)
        self.groups = groups
        self.position = {parameter: i for i, parameter in enumerate(p for group in groups for p in group)}
        self.sliced = {parameter for held in self.all_held for parameter, _, _ in held.slices()}
        device = next(iter(self.position)).device
        self.device = device if device.type == "cuda" else torch.device("cpu")

    def units(self) -> list[Held]:
        return [held for held in self.all_held if any(parameter in self.position for parameter, _, _ in held.slices())]

    def others(self) -> list[tuple[nn.Parameter, str]]:
        return [(parameter, self.names[parameter][0]) for parameter in self.position if parameter not in self.sliced]

    def of_unit(self, held: Held, saved: State) -> dict[int, dict]:
        """A parameter of which this rank has nothing has no state, as one that was never stepped."""
        _check_unit(held, saved)
        found = [(p, of) for p, of in slice_of_state(held, saved) if p in self.position and p.numel() > 0]
        return {self.position[parameter]: of for parameter, of in found}

    def param_groups(self, saved: list[dict]) -> list[dict]:
        result = []
        for group in self.groups:
            own = {name for parameter in group for name in self.names[parameter]}
            options = next((of for of in saved if own & set(of["params"])), {})
            result.append({**options, "params": [self.position[parameter] for parameter in group]})
        return result

    def check_names(self, saved: Iterable[str]) -> None:
        own = {name for parameter in self.position for name in self.names[parameter]}
        for what, names in (("missing", own - set(saved)), ("not in the optimizer", set(saved) - own)):
            if names:
                raise ValueError(
                    f"shardplan: the optimizer state to load: {what}: {', '.join(sorted(names))} (strict=False lets "
                    "them be)"
                )


def _check_unit(held: Held, saved: State) -> None:
    """Parameters that lie in one flat parameter have one state together."""
    present = [name for name in held.names if name in saved]
    if held.flat.original or not present:
        return
    for name in present[1:]:
        if set(saved[name]) != set(saved[present[0]]):
            raise ValueError(
                f"shardplan: differing optimizer state names for parameters of one flat parameter: {present[0]}, {name}"
            )
    for key in saved[present[0]]:
        values = [saved[name][key] for name in present]
        if any(isinstance(value, torch.Tensor) and value.dim() > 0 for value in values):
            if len({(type(v).__name__ if not isinstance(v, torch.Tensor) else v.dtype) for v in values}) > 1:
                raise ValueError(f"shardplan: differing optimizer state types for state {key} of {', '.join(present)}")
            continue
        said = {(v.item(), v.dtype) if isinstance(v, torch.Tensor) else repr(v) for v in values}
        if len(said) > 1 or len(present) < len(held.names):
            raise ValueError(
                f"shardplan: all parameters of a flat parameter must have scalar state {key} with the same value and "
                f"dtype; found {sorted(map(str, said))}"
                f" for {', '.join(present)} of {', '.join(held.names)}"
            )


def _cut_like(parameter: nn.Parameter, of: dict) -> dict:
    """This rank's part of the state of a parameter outside of flat units."""

    def cut(value: object) -> object:
        if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or not isinstance(value, torch.Tensor):
            return value
        if value.shape != parameter.shape or value.dim() == 0:
            return value
        whole = value.to(parameter.device)
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)

    return {key: cut(value) for key, value in of.items()}


def _check_dict(state_dict: dict) -> None:
    if "state" not in state_dict or "param_groups" not in state_dict:
        raise ValueError('shardplan: an optimizer state dict has the keys "state" and "param_groups"')


def shard_full_optim_state_dict(
    full_optim_state_dict: dict,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
    *,
    strict: bool = False,
) -> dict:
    """This rank's part of a full (or sharded) state dict, as optim.load_state_dict takes it. strict: a parameter of the
    optimizer without state, or one of the state dict that the optimizer has not, is an error."""
    _check_dict(full_optim_state_dict)
    target = _Target(model, _parameter_groups(model, optim, optim_input))
    saved: State = full_optim_state_dict["state"]
    if strict:
        target.check_names(saved)
    state: dict[int, dict] = {}
    for held in target.units():
        state |= target.of_unit(held, saved)
    for parameter, name in target.others():
        if name in saved:
            state[target.position[parameter]] = _cut_like(parameter, saved[name])
    return {"state": state, "param_groups": target.param_groups(full_optim_state_dict["param_groups"])}


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict, model: nn.Module, optim: torch.optim.Optimizer
) -> dict:
    """The reverse of sharded_optim_state_dict, as optim.load_state_dict takes it. Collective."""
    return shard_full_optim_state_dict(sharded_optim_state_dict, model, optim=optim)


def scatter_full_optim_state_dict(
    full_optim_state_dict: dict | None,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
    group=None,
    *,
    strict: bool = False,
) -> dict:
    """shard_full_optim_state_dict of what the first rank has; the others give None. Sent unit by unit. Collective."""
    if group is not None and dist.get_world_size(group) != dist.get_world_size():
        raise ValueError("shardplan: scatter_full_optim_state_dict is for all ranks: give no group")
    first = dist.get_rank() == 0
    if first:
        _check_dict(full_optim_state_dict)
    saved: State = full_optim_state_dict["state"] if first else {}
    target = _Target(model, _parameter_groups(model, optim, optim_input))
    told = [(sorted(saved), full_optim_state_dict["param_groups"]) if first else None]
    dist.broadcast_object_list(told, src=0)
    names, param_groups = told[0]
    if strict:
        target.check_names(names)
    state: dict[int, dict] = {}
    for held in target.units():
        part = from_rank_0({name: saved[name] for name in held.names if name in saved}, target.device)
        state |= target.of_unit(held, part)
    for parameter, name in target.others():
        if name in names:
            part = from_rank_0({name: saved[name]} if first else {}, target.device)
            state[target.position[parameter]] = _cut_like(parameter, part[name])
    return {"state": state, "param_groups": target.param_groups(param_groups)}


def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group=None,
    *,
    strict: bool = False,
) -> dict:
    """Turns the result of `optim_state_dict`, full or sharded, into the argument of optim.load_state_dict.
    load_directly: it is loaded, too. Collective."""
    del group  # units know their ranks
    if is_named_optimizer:
        raise ValueError(
            "shardplan: optimizers whose state dicts have names are not supported: give a torch.optim optimizer"
        )
    loadable = shard_full_optim_state_dict(optim_state_dict, model, optim=optim, strict=strict)
    if load_directly:
        optim.load_state_dict(loadable)
    return loadable


def rekey_optim_state_dict(
    optim_state_dict: dict,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict:
    """Positions of a plain model's optimizer in place of names, or the reverse. `model` is without a plan, or of the
    layout per_parameter."""
    _check_dict(optim_state_dict)
    if optim_state_key_type not in tuple(OptimStateKeyType):
        raise ValueError(
            f"shardplan: rekey_optim_state_dict: expected an OptimStateKeyType, found {optim_state_key_type!r}"
        )
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [names[parameter] for group in _parameter_groups(model, optim, optim_input) for parameter in group]
    to_id = optim_state_key_type is OptimStateKeyType.PARAM_ID
    key_of = {name: i for i, name in enumerate(order)} if to_id else dict(enumerate(order))
    unknown = [key for key in optim_state_dict["state"] if key not in key_of]
    unknown += [key for options in optim_state_dict["param_groups"] for key in options["params"] if key not in key_of]
    if unknown:
        raise ValueError(f"shardplan: rekey_optim_state_dict: no parameter of the optimizer is {unknown[0]!r}")
    state = {key_of[key]: of for key, of in optim_state_dict["state"].items()}
    groups = [
        {**options, "params": [key_of[key] for key in options["params"]]}
        for options in optim_state_dict["param_groups"]
    ]
    if to_id:
        groups = [{**options, "params": sorted(options["params"])} for options in groups]
    return {"state": state, "param_groups": groups}
