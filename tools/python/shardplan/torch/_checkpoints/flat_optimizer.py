# SPDX-License-Identifier: Apache-2.0
"""The optimizer's state of flat units under the names and in the shapes of the original parameters, as FSDP1 saves it.

An optimizer holds of a flat unit what this rank's slice has. Here that is gathered, cut into the original parameters,
and the reverse. Whatever of a parameter's state has the shape of the parameter is cut so; all else (`step`) is the same
for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .._parameters.flat import FlatUnit

State = dict[str, dict[str, object]]  # by name of an original parameter


@dataclasses.dataclass
class Held:
    """The parameters of a flat unit that an optimizer may hold. names: those of its original parameters, in the model
    at hand."""

    flat: FlatUnit
    names: list[str]

    def names_of(self, parameter: nn.Parameter) -> list[str]:
        """The original parameters that a visible one stands for."""
        if not self.flat.original:
            return self.names
        return [self.names[i] for i, visible in enumerate(self.flat.visible) if visible is parameter]

    def slices(self) -> list[tuple[nn.Parameter, int, int]]:
        """(visible parameter, first element in the shard, elements) of each."""
        if not self.flat.original:
            return [(self.flat.visible[0], 0, self.flat.shard.numel())]
        return [(visible, *self.flat.slice_of(i)) for i, visible in enumerate(self.flat.visible)]


def _is_sliced(value: object, parameter: nn.Parameter, flat: FlatUnit) -> bool:
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    return value.dim() > 0 or flat.ranks == 1


def _described(optimizer: torch.optim.Optimizer, held: Held) -> list[dict[str, object]]:
    """For each slice on this rank: the dtype of a state that is cut like the parameter, the value of any other."""
    found = []
    for parameter, _, _ in held.slices():
        state = optimizer.state.get(parameter, {}) if parameter.numel() > 0 else {}
        found.append({k: v.dtype if _is_sliced(v, parameter, held.flat) else v for k, v in state.items()})
    return found


def _on_all_ranks(described: list[dict], flat: FlatUnit) -> list[dict]:
    """The union over ranks. A rank that holds no element of a parameter has no state of it."""
    if flat.group is None or flat.ranks == 1:
        return described
    of_ranks: list = [None] * flat.ranks
    dist.all_gather_object(of_ranks, described, group=flat.group)
    return [{k: v for of in of_ranks for k, v in of[i].items()} for i in range(len(described))]


def _gather(own: torch.Tensor, flat: FlatUnit) -> torch.Tensor:
    if flat.ranks == 1:
        return own
    whole = own.new_empty(flat.ranks * own.numel())
    dist.all_gather_into_tensor(whole, own, group=flat.group)
    return whole


def _copied(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


@torch.no_grad()
def original_state(
    optimizer: torch.optim.Optimizer, held: Held, shape_it: Callable[[torch.Tensor, FlatUnit], torch.Tensor]
) -> State:
    """By original parameter; shape_it(whole tensor, unit) -> what is kept of it. Collective."""
    flat = held.flat
    described = _on_all_ranks(_described(optimizer, held), flat)
    result: State = {name: {} for name in held.names}
    by_name = described if flat.original else described * len(held.names)
    for key in dict.fromkeys(key for of in described for key in of):
        dtype = next((of[key] for of in described if isinstance(of.get(key), torch.dtype)), None)
        whole = None
        if dtype is not None:
            own = torch.zeros(flat.shard.numel(), dtype=dtype, device=flat.shard.device)
            for parameter, offset, numel in held.slices():
                if numel > 0 and key in (state := optimizer.state.get(parameter, {})):
                    own[offset : offset + numel].copy_(state[key].reshape(-1))
            whole = _gather(own, flat)
        for name, expected, of in zip(held.names, flat.unit.parameters, by_name):
            if key not in of:
                continue
            if not isinstance(of[key], torch.dtype):
                result[name][key] = _copied(of[key])
                continue
            view = whole.narrow(0, expected.flat_offset, torch.Size(expected.shape).numel()).view(list(expected.shape))
            result[name][key] = shape_it(view, flat)
    return {name: state for name, state in result.items() if state}


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _sliced_keys(held: Held, state: State) -> set[str]:
    """Keys of states that are cut like the parameter. A scalar parameter's cannot be told from a plain number: the
    other parameters of the unit decide."""
    parameters = list(zip(held.names, held.flat.unit.parameters))
    told = [(name, p) for name, p in parameters if len(p.shape) > 0] or parameters

    def cut(value: object, shape: list[int]) -> bool:
        return isinstance(value, torch.Tensor) and list(value.shape) == shape

    return {k for name, p in told for k, v in state.get(name, {}).items() if cut(v, list(p.shape)) and k != "step"}


@torch.no_grad()
def slice_of_state(held: Held, state: State) -> list[tuple[nn.Parameter, dict[str, object]]]:
    """The reverse: what the optimizer is to hold of each visible parameter. Values are whole or DTensors. Collective
    where they are DTensors."""
    flat = held.flat
    sliced = _sliced_keys(held, state)
    result = [(parameter, {}) for parameter, _, _ in held.slices()]
    begin = flat.index * flat.shard.numel()
    for key in dict.fromkeys(key for name in held.names for key in state.get(name, {})):
        values = [state.get(name, {}).get(key) for name in held.names]
        if key not in sliced:
            own = values if flat.original else [next(v for v in values if v is not None)]
            for (_, of), value in zip(result, own):
                if value is not None:
                    of[key] = _copied(_whole(value) if isinstance(value, torch.Tensor) else value)
            continue
        dtype = next(value.dtype for value in values if value is not None)
        shard = torch.zeros(flat.shard.numel(), dtype=dtype, device=flat.shard.device)
        for i, (expected, value) in enumerate(zip(flat.unit.parameters, values)):
            if value is None:
                continue
            offset, numel = flat.slice_of(i)
            first = begin + offset - expected.flat_offset
            shard[offset : offset + numel].copy_(_whole(value).reshape(-1)[first : first + numel])
        for i, ((_, offset, numel), (parameter, of)) in enumerate(zip(held.slices(), result)):
            if not flat.original or values[i] is not None:
                of[key] = shard[offset : offset + numel].view(parameter.shape).clone()
    return [(parameter, of) for parameter, of in result if of]
