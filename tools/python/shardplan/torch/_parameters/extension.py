# SPDX-License-Identifier: Apache-2.0
"""Parameters that are tensor subclasses with an all-gather extension, as FSDP2 calls it (fsdp_pre_all_gather,
fsdp_post_all_gather; torch/distributed/fsdp/_fully_shard/_fsdp_param.py)."""

from __future__ import annotations

import inspect

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._job.arguments import PlanError
from .rules import mixed_precision_policy, torch_dtype
from .shard import ShardedParameter

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def _plain(parameter: torch.Tensor) -> torch.Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


class ExtendedParameter:
    """One such parameter on this rank; see [Note: extensions] in executor/training/binding/parameters/extensions.h."""

    def __init__(self, expected, sharded: ShardedParameter, module: nn.Module, mesh: DeviceMesh, precision) -> None:
        self.expected, self.sharded, self.module, self.mesh = expected, sharded, module, mesh
        self.policy = mixed_precision_policy(precision)
        self.size = torch.Size(expected.shape)
        self.stride = torch.empty(self.size, device="meta").stride()
        self.dtype = self.policy.param_dtype or torch_dtype(expected.dtype)
        self.metadata, self.sizes = None, []
        self.unsharded: nn.Parameter | None = None

    def _local(self) -> torch.Tensor:
        return self.sharded.shard._local_tensor

    def inputs(self) -> list[torch.Tensor]:
        """The tensors that this rank gathers, each 1-D."""
        pre = getattr(self._local(), PRE)
        old = len(inspect.signature(pre).parameters) == 1
        arguments = () if old else (self.size, self.stride, self.module, self.policy)
        made, self.metadata = pre(self.mesh, *arguments)
        found = [(str(tensor.dtype).removeprefix("torch."), tensor.numel()) for tensor in made]
        wanted = [(tensor.dtype, tensor.numel) for tensor in self.expected.gathered]
        if found != wanted:
            raise PlanError(f"parameter {self.expected.fqn}: {PRE} is planned to give {wanted}, found {found}")
        self.sizes = [tensor.size() for tensor in made]
        return [tensor.reshape(-1) for tensor in made]

    def finish(self, outputs: list[torch.Tensor]):
        """The whole parameter is there: its nn.Parameter and the tensors that were allocated for it, the first time."""
        shaped = tuple(output.view(-1, *size[1:]) for output, size in zip(outputs, self.sizes))
        post = getattr(self._local(), POST)
        metadata, self.metadata = self.metadata, None
        if self.unsharded is not None:
            post(shaped, metadata, self.dtype, out=self.unsharded)
            return None
        tensor, inner = post(shaped, metadata, self.dtype)
        gathered = {output.untyped_storage()._cdata for output in outputs}
        allocated = [t for t in inner if t.untyped_storage()._cdata not in gathered]
        found = [(str(t.dtype).removeprefix("torch."), t.numel()) for t in allocated]
        wanted = [(t.dtype, t.numel) for t in self.expected.unsharded]
        if found != wanted:
            raise PlanError(f"parameter {self.expected.fqn}: {POST} is planned to allocate {wanted}, found {found}")
        whole = torch.as_strided(tensor, self.size, self.stride, 0)
        self.unsharded = nn.Parameter(whole, requires_grad=self.expected.requires_grad)
        return self.unsharded, allocated
