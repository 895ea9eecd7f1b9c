# SPDX-License-Identifier: Apache-2.0
"""Does a plan fit the model in front of it? Every difference is named by the parameter it concerns."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._job.arguments import PlanError

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")  # that a user puts around a module the trace knows bare
_SHOWN = 8  # differences printed; the rest are counted


@dataclasses.dataclass
class Slot:
    """A place where a module registers a parameter."""

    module: nn.Module
    name: str  # "weight"
    fqn: str


@dataclasses.dataclass
class ModelParameter:
    """A parameter object of the model and all its names, in named_modules order."""

    parameter: nn.Parameter
    slots: list[Slot]


def trace_fqn(name: str) -> str:
    """The name that a trace of the bare model has for it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of the wrappers."""
    while inner := next((getattr(module, name) for name in _WRAPPERS if hasattr(module, name)), None):
        module = inner
    return module


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every FQN of every module -> the module; of a wrapped one the outermost wrapper, which is what others call."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(trace_fqn(name), module)
    return found


def parameters_of(model: nn.Module) -> dict[str, ModelParameter]:
    """Every FQN of every parameter -> the parameter; tied names share one ModelParameter."""
    by_identity: dict[int, ModelParameter] = {}
    by_fqn: dict[str, ModelParameter] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            fqn = trace_fqn(f"{prefix}.{name}" if prefix else name)
            found = by_identity.setdefault(id(parameter), ModelParameter(parameter, []))
            found.slots.append(Slot(module, name, fqn))
            by_fqn[fqn] = found
    return by_fqn


def untied(plan, by_fqn: dict[str, ModelParameter]) -> dict[str, ModelParameter]:
    """`by_fqn` with an entry for each unit that has a parameter. If a parameter is tied across units, each unit gets a
    copy, as in PyTorch, with the names that the plan gives it. Warns of each, naming them."""
    apart = dict(by_fqn)
    for unit in plan.units:
        for expected in unit.parameters:
            found = by_fqn.get(expected.fqn)
            names = {expected.fqn, *expected.shared_with}
            if found is None or names == {slot.fqn for slot in found.slots}:
                continue
            own = ModelParameter(found.parameter, [slot for slot in found.slots if slot.fqn in names])
            apart |= {slot.fqn: own for slot in own.slots}
    for found in {id(found): found for found in by_fqn.values()}.values():
        entries = {id(apart[slot.fqn]): apart[slot.fqn] for slot in found.slots}
        if len(entries) > 1 and id(found) not in entries:
            names = " and ".join(entry.slots[0].fqn for entry in entries.values())
            warnings.warn(
                f"shardplan: {names} are tied, in several units: each unit trains a copy of its own, as in PyTorch's "
                "FSDP",
                stacklevel=4,
            )
        else:
            apart |= {slot.fqn: found for slot in found.slots}  # not as planned: check_model says what differs
    return apart


def dtype_name(dtype: torch.dtype) -> str:
    """The name in documents: "float32"."""
    return str(dtype).removeprefix("torch.")


def _unit_name(unit) -> str:
    return unit.fqn or "the root"


def _difference(expected, found: ModelParameter | None, unit) -> str | None:
    """The difference in one parameter of the plan, or None."""

    def says(what: str, in_plan, in_model) -> str:
        return f"parameter {expected.fqn} of {_unit_name(unit)}: {what} expected {in_plan}, found {in_model}"

    if found is None:
        return f"parameter {expected.fqn} of {_unit_name(unit)}: expected by the plan, not in the model"
    parameter = found.parameter
    shape = list(parameter._local_tensor.shape if isinstance(parameter, DTensor) else parameter.shape)
    if shape != list(expected.shape):
        return says("shape", list(expected.shape), shape)
    if dtype_name(parameter.dtype) != expected.dtype:
        return says("dtype", expected.dtype, dtype_name(parameter.dtype))
    if parameter.requires_grad != expected.requires_grad:
        return says("requires_grad", expected.requires_grad, parameter.requires_grad)
    names = sorted(slot.fqn for slot in found.slots if slot.fqn != expected.fqn)
    if names != sorted(expected.shared_with):
        return says("tied names", sorted(expected.shared_with) or "none", names or "none")
    return None


def _extension_difference(expected, found: ModelParameter, unit) -> str | None:
    """An all-gather extension that only the plan or only the model knows, or that is not replayed."""
    name = f"parameter {expected.fqn} of {_unit_name(unit)}"
    in_plan, in_model = bool(expected.gathered), hasattr(found.parameter, "fsdp_pre_all_gather")
    if in_plan != in_model:
        return f"{name}: all-gather extension expected {in_plan}, found {in_model}"
    if in_plan and (unit.shard_communicator < 0 or expected.shard_dim != 0):
        return f"{name}: all-gather extensions are replayed on several ranks and for dimension 0 only"
    return None


def _differences(plan, by_fqn: dict[str, ModelParameter], modules: set[str]) -> Iterable[str]:
    held: set[int] = set()  # ids of the entries of by_fqn that units have
    for unit in plan.units:
        for fqn in unit.modules:
            if fqn not in modules:
                yield f"module {fqn} of {_unit_name(unit)}: expected by the plan, not in the model"
        for expected in unit.parameters:
            found = by_fqn.get(expected.fqn)
            held.add(id(found))
            if found is not None and (difference := _extension_difference(expected, found, unit)):
                yield difference
            if difference := _difference(expected, found, unit):
                yield difference
    ignored = set(plan.ignored_parameters)
    for fqn, found in by_fqn.items():
        if id(found) not in held and found.slots[0].fqn == fqn and fqn not in ignored:
            yield f"parameter {fqn}: in the model, in no unit of the plan"


def check_model(plan, model: nn.Module, by_fqn: dict[str, ModelParameter]) -> None:
    """Raises PlanError unless units, FQNs, shapes, dtypes, requires_grad and ties are the plan's."""
    differences = list(_differences(plan, by_fqn, set(modules_of(model))))
    if not differences:
        return
    shown = "\n  ".join(differences[:_SHOWN])
    more = f"\n  and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    raise PlanError(
        f"the plan was made for another model ({plan.model or 'unnamed'}): {len(differences)} differences from "
        f"{type(model).__name__}:\n  {shown}{more}\nTrace this model and plan it again."
    )


def check_placement(by_fqn: dict[str, ModelParameter], mesh: DeviceMesh | None) -> torch.device:
    """The device that the parameters are on, or that those on the meta device will be on. Raises PlanError for mixed
    devices and for parameters that are not contiguous."""
    devices = {found.parameter.device for found in by_fqn.values()}
    real = {device for device in devices if device.type != "meta"}
    if len(real) > 1:
        raise PlanError(f"the model's parameters are on several devices: {sorted(map(str, real))}")
    for fqn, found in by_fqn.items():
        if not found.parameter.is_contiguous():
            raise PlanError(f"parameter {fqn} is not contiguous (stride {found.parameter.stride()})")
    if real:
        return real.pop()
    if mesh is not None:
        return torch.device(mesh.device_type)
    return torch.device("cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu")


def refuse_to_copy(*_args) -> None:
    """__deepcopy__ and __reduce_ex__ of what an applied model has: its copy would share hooks and memory with it. FSDP2
    refuses, too."""
    raise RuntimeError(
        "shardplan: a module of an applied plan does not support deepcopy and pickling: the copy's hooks would be "
        "this one's. "
        "Save and load by state_dict(), and copy the model before shardplan.torch.apply"
    )
