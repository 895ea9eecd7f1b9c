# SPDX-License-Identifier: Apache-2.0
"""Flat units, FSDP1's layout: the parameters of a unit concatenated to one, cut into equal slices.

Without original parameters (FSDP1's default) a unit shows one parameter, `_flat_param` of its module, whose data is
this rank's slice; the modules' own names hold plain tensors, views of the gathered memory. With them (use_orig_params)
the model keeps its nn.Parameters, and each one's data is what of it lies in this rank's slice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from .._model.fit import ModelParameter, Slot, modules_of
from .rules import matches, precision_of, torch_dtype

FLAT_NAME = "_flat_param"
_ATTRIBUTE = "_shardplan_flat_units"


def flat_units(model: nn.Module) -> list[FlatUnit]:
    """The flat units of an applied plan, in the plan's order."""
    return getattr(model, _ATTRIBUTE, [])


def fast_slot(module: nn.Module) -> bool:
    """May a parameter be swapped in the module's dictionaries, without the class's own __setattr__ (RNNs have one)?"""
    return type(module).__setattr__ is nn.Module.__setattr__


def _native_slots(slots: list[Slot], registered: bool) -> list[tuple]:
    """registered: in module._parameters; otherwise as a plain attribute (of modules, whose dictionaries own the
    runtime)."""
    return [(s.module, s.module._parameters if registered else None, s.name, fast_slot(s.module)) for s in slots]


@torch.no_grad()
def flatten(unit, parameters: list[ModelParameter]) -> torch.Tensor:
    """The flat parameter: 1-D, zeros where it is padded."""
    if not parameters:  # of a unit that has none
        return torch.zeros(0)
    first = parameters[0].parameter
    whole = torch.zeros(unit.flat_numel, dtype=first.dtype, device=first.device)
    for expected, found in zip(unit.parameters, parameters):
        data = found.parameter.detach().reshape(-1)
        whole[expected.flat_offset : expected.flat_offset + data.numel()].copy_(data)
    return whole


class FlatUnit:
    """A flat unit of the plan on this rank.

    ranks, index: how many slices the flat parameter is cut into, and which one is this rank's; group: the ranks that
    hold the others. shard: this rank's slice. visible: the parameters that the optimizer sees. slots: by parameter of
    the unit, where modules register it.
    """

    def __init__(self, runtime, unit_id: int, plan, by_fqn: dict[str, ModelParameter], groups: list) -> None:
        self.id, self.unit = unit_id, plan.units[unit_id]
        self.original: bool = plan.use_orig_params
        self.parameters = [by_fqn[expected.fqn] for expected in self.unit.parameters]
        self.slots = [list(found.slots) for found in self.parameters]
        self.ranks, self.index, self.group = 1, 0, None
        if self.unit.shard_communicator >= 0:
            self.group: dist.ProcessGroup = groups[self.unit.shard_communicator]
            self.ranks, self.index = self.group.size(), self.group.rank()
        replicas = self.unit.replicate_communicator
        apart = self.group or (groups[replicas] if replicas >= 0 else None)
        self.is_first = apart is None or apart.rank() == 0  # of the ranks that FSDP1 gives the unit
        numel = self.unit.flat_numel // self.ranks
        self.shard = flatten(self.unit, self.parameters)[self.index * numel : (self.index + 1) * numel].clone()
        if plan.shards_on_host(unit_id) and self.shard.device.type != "cpu":
            self.shard = self.shard.cpu().pin_memory()
        self.visible: list[nn.Parameter] = []
        self.module: nn.Module | None = None
        self.mesh: DeviceMesh | None = None  # the plan's
        self.supply(runtime)

    def supply(self, runtime) -> None:
        """The shard is what `runtime` gathers from now on."""
        self.runtime = runtime
        runtime.set_flat_shard(self.id, self.shard)

    @property
    def device(self) -> torch.device:
        """The device on which it is gathered; the shard may be in host memory."""
        return self.runtime.unsharded_view(self.id, 0).device if self.parameters else self.shard.device

    @property
    def trains(self) -> bool:
        """Is its backward done with its flat gradient? (A unit without parameters has nothing to be done with.)"""
        return not self.parameters or any(expected.requires_grad for expected in self.unit.parameters)

    def slice_of(self, position: int) -> tuple[int, int]:
        """(first element in the shard, elements) of what the shard holds of a parameter."""
        expected = self.unit.parameters[position]
        begin = self.index * self.shard.numel()
        first = max(expected.flat_offset, begin)
        last = min(expected.flat_offset + torch.Size(expected.shape).numel(), begin + self.shard.numel())
        return (first - begin, last - first) if last > first else (0, 0)

    def shape_of(self, position: int) -> list[int]:
        """Shape of an original parameter's data between steps."""
        return list(self.unit.parameters[position].shape) if self.ranks == 1 else [self.slice_of(position)[1]]

    def show_slice(self, position: int) -> None:
        """Original parameters: the data is this rank's slice."""
        offset, numel = self.slice_of(position)
        self.parameters[position].parameter.data = self.shard[offset : offset + numel].view(self.shape_of(position))

    def show_view(self, position: int) -> None:
        """No original parameters: the modules hold a view of the gathered memory, which may be empty."""
        view = self.runtime.unsharded_view(self.id, position)
        for slot in self.slots[position]:
            delattr(slot.module, slot.name)
            setattr(slot.module, slot.name, view)

    def write_back(self) -> None:
        """Copies data that the user has replaced since into the shard; a parameter that was itself replaced is
        forgotten."""
        self.runtime.write_back(self.id)
        if not self.original:
            return
        for position, slots in enumerate(self.slots):
            if self.slice_of(position)[1] > 0:
                found = slots[0].module._parameters[slots[0].name]
                self.parameters[position].parameter = self.visible[position] = found

    def _visible_original(self) -> list[tuple]:
        described = []
        for position, (expected, found) in enumerate(zip(self.unit.parameters, self.parameters)):
            self.show_slice(position)
            offset, numel = self.slice_of(position)
            slots = _native_slots(self.slots[position], registered=True)
            described.append((found.parameter, expected.fqn, offset, self.shape_of(position), numel > 0, slots))
        return described

    def _visible_flat(self) -> list[tuple]:
        if not self.parameters:
            return []
        for position, found in enumerate(self.parameters):
            self.show_view(position)
            found.parameter = None  # the whole one goes
        parameter = self.visible[0] if self.visible else nn.Parameter(self.shard, requires_grad=self.trains)
        self.module.register_parameter(FLAT_NAME, parameter)
        slot = (self.module, self.module._parameters, FLAT_NAME, True)
        name = ".".join(filter(None, (self.unit.modules[0], FLAT_NAME)))
        return [(parameter, name, 0, [self.shard.numel()], True, [slot])]

    @torch.no_grad()
    def make_whole(self, whole: torch.Tensor) -> None:
        """The modules hold plain parameters, which are cut out of the gathered flat parameter."""
        if not self.original and self.parameters:
            del self.module._parameters[FLAT_NAME]
        for expected, slots in zip(self.unit.parameters, self.slots):
            shape = torch.Size(expected.shape)
            part = whole[expected.flat_offset : expected.flat_offset + shape.numel()]
            parameter = nn.Parameter(part.view(shape).clone(), requires_grad=expected.requires_grad)
            for slot in slots:
                slot.module._parameters.pop(slot.name, None)
                vars(slot.module).pop(slot.name, None)
                setattr(slot.module, slot.name, parameter)

    def add(self, plan, module: nn.Module) -> None:
        """Makes what the user sees of the unit, whose module is `module`. After runtime.start()."""
        self.module = module
        described = self._visible_original() if self.original else self._visible_flat()
        self.visible = [parameter for parameter, *_ in described]
        views = [_native_slots(slots, registered=self.original) for slots in self.slots]
        precision = precision_of(plan, self.unit.modules[0], module)
        low = precision is not None and precision.keep_low_precision_grads
        grad_dtype = torch_dtype(self.unit.param_dtype) if low else None
        self.runtime.add_flat_unit(self.id, self.original, self.trains, grad_dtype, described, views)


def _buffer_dtypes(plan, model: nn.Module) -> list[tuple[torch.Tensor, torch.dtype]]:
    """(floating-point buffer, the buffer_dtype of its unit): of nested units the innermost one decides."""
    modules = modules_of(model)
    fqns = {fqn for unit in plan.units for fqn in unit.modules} | {""}
    ignored = [m for fqn, m in modules.items() if any(matches(entry, fqn, m) for entry in plan.ignored_modules)]
    done = {id(buffer) for module in ignored for buffer in module.buffers()}
    found = []
    for fqn in sorted(fqns, key=lambda fqn: -len(fqn.split(".")) if fqn else 1):
        precision = precision_of(plan, fqn, modules[fqn])
        dtype = torch_dtype(precision.buffer_dtype) if precision is not None else None
        for buffer in modules[fqn].buffers():
            if id(buffer) not in done and dtype is not None and buffer.is_floating_point():
                found.append((buffer, dtype))
            done.add(id(buffer))
    return found


def cast_buffers(plan, model: nn.Module) -> Callable[[], None]:
    """Mixed precision's buffer_dtype: floating-point buffers are cast now; with full_precision_in_eval a forward of a
    model that is not in training mode finds them in their own dtype again. Returns what undoes it."""
    casts = [(buffer, dtype, buffer.dtype) for buffer, dtype in _buffer_dtypes(plan, model)]

    @torch.no_grad()
    def cast(low: bool) -> None:
        for buffer, dtype, original in casts:
            buffer.data = buffer.to(dtype if low else original)

    cast(low=True)
    modules = modules_of(model)
    units = [unit for unit in plan.units if unit.parameters and "" in unit.modules] or plan.units
    precisions = [precision_of(plan, unit.modules[0], modules[unit.modules[0]]) for unit in units]
    handles = []
    if casts and plan.full_precision_in_eval and any(p is not None and p.param_dtype for p in precisions):
        handles.append(model.register_forward_pre_hook(lambda module, _args: cast(low=module.training), prepend=True))

    def undo() -> None:
        for handle in handles:
            handle.remove()
        cast(low=False)

    return undo


def remember(model: nn.Module, units: list[FlatUnit]) -> None:
    object.__setattr__(model, _ATTRIBUTE, units)


def forget(model: nn.Module) -> None:
    """The reverse of remember."""
    vars(model).pop(_ATTRIBUTE)
