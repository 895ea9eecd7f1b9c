# SPDX-License-Identifier: Apache-2.0
"""Sources of a model's values before they are sharded: modules on the meta device, or rank 0."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._job.arguments import PlanError
from .fit import ModelParameter, Slot

Initialize = Callable[[nn.Module], None]


def reset_parameters(module: nn.Module) -> None:
    """The default initialization of a module."""
    if not hasattr(module, "reset_parameters"):
        raise PlanError(
            f"{type(module).__name__} has parameters or buffers on the meta device and no reset_parameters(): give "
            "shardplan.torch.auto (or apply) initialize=, a function of one module that fills them. Where the script "
            "calls model.to_empty() and then the "
            "model's own initialization behind fully_shard, both may stay behind auto: then initialize=lambda module: "
            "None"
        )
    module.reset_parameters()


def _is_on_meta(module: nn.Module) -> bool:
    own = [*module._parameters.values(), *module._buffers.values()]
    return any(tensor is not None and tensor.is_meta for tensor in own)


def _materialize_tensors(module: nn.Module, by_fqn_slots: dict[int, list[Slot]], device: torch.device) -> None:
    """Empty tensors instead of meta ones; a tied parameter stays tied."""
    for name, parameter in list(module._parameters.items()):
        if parameter is None or not parameter.is_meta:
            continue
        made = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
        vars(made).update(vars(parameter))  # annotations of spmd_types, and what `initialize` looks at
        for slot in by_fqn_slots[id(parameter)]:
            slot.module.register_parameter(slot.name, made)
    for name, buffer in list(module._buffers.items()):
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=device)


class Source:
    """Makes the values of a unit's parameters be there, unit by unit, so that the whole model never is."""

    def __init__(
        self,
        by_fqn: dict[str, ModelParameter],
        mesh: DeviceMesh,
        device: torch.device,
        initialize: Initialize,
        from_rank_0: bool,
    ) -> None:
        self._slots: dict[int, list[Slot]] = {}  # by id of the parameter; of one that units share, all of theirs
        self._held: dict[int, list[ModelParameter]] = {}  # by id of the module: what its units have of it
        for found in {id(found): found for found in by_fqn.values()}.values():
            self._slots.setdefault(id(found.parameter), []).extend(found.slots)
            for slot in found.slots:
                self._held.setdefault(id(slot.module), []).append(found)
        self._mesh, self._device = mesh, device
        self._initialize, self._from_rank_0 = initialize, from_rank_0

    def prepare(self, modules: list[nn.Module]) -> None:
        """Initializes those of the modules that are on the meta device (a module's own tensors, not its children's)."""
        for module in modules:
            if _is_on_meta(module):
                _materialize_tensors(module, self._slots, self._device)
                with torch.no_grad():
                    self._initialize(module)
            for found in self._held.get(id(module), ()):  # the objects that the modules hold now
                found.parameter = found.slots[0].module._parameters[found.slots[0].name]
        if self._from_rank_0:
            self._broadcast(modules)

    def _broadcast(self, modules: list[nn.Module]) -> None:
        sent: set[int] = set()
        for module in modules:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is None or id(tensor) in sent:
                    continue
                sent.add(id(tensor))
                broadcast_over(self._mesh, tensor.detach())


def broadcast_over(mesh: DeviceMesh, tensor: torch.Tensor) -> None:
    """The first rank's values on every rank: along the last dimension of the mesh, then along the ones before it; of a
    DTensor not along its own dimensions, where each rank has its own part."""
    own = tensor.device_mesh.get_all_groups() if isinstance(tensor, DTensor) else []
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    try:
        groups = mesh.get_all_groups()
    except RuntimeError as error:
        raise PlanError(
            "broadcast_from_rank_0 is for one mesh of all ranks, and the units have several: make the values the same "
            "before"
        ) from error
    for group in reversed(groups):
        if group not in own:
            dist.broadcast(local, dist.get_global_rank(group, 0), group=group)
