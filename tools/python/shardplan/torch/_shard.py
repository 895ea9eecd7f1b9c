"""Sharded parameters, laid out as FSDP2 lays them out."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


@dataclasses.dataclass
class ShardedParameter:
    """What a rank keeps of one parameter.

    shard: what the modules hold between steps, a DTensor whose local tensor is the first rows of `padded`.
    padded: flat, ceil(rows / ranks) rows, zeros after this rank's own: what is gathered.
    """

    shard: nn.Parameter
    padded: torch.Tensor


def _placements(mesh: DeviceMesh) -> list:
    """Shard(0) over the last mesh dimension, replicated over the others."""
    return [Replicate()] * (mesh.ndim - 1) + [Shard(0)]


def as_dtensor(local: torch.Tensor, mesh: DeviceMesh, shape: torch.Size) -> DTensor:
    """A DTensor around exactly `local` for a whole tensor of `shape`; nothing is communicated or checked."""
    stride = torch.empty(shape, device="meta").stride()
    with torch.no_grad():
        return DTensor.from_local(local, mesh, _placements(mesh), run_check=False, shape=shape, stride=stride)


@torch.no_grad()
def shard_parameter(parameter: nn.Parameter, mesh: DeviceMesh) -> ShardedParameter:
    """Cuts dim 0 as torch.chunk does. `parameter` holds the whole values, the same on all ranks."""
    ranks = mesh.size(mesh.ndim - 1)
    rows = math.ceil(parameter.shape[0] / ranks)
    own = list(torch.chunk(parameter, ranks))[mesh.get_local_rank(mesh.ndim - 1) :][:1]
    length = own[0].shape[0] if own else 0
    padded = parameter.new_zeros((rows, *parameter.shape[1:]))
    if own:
        padded[:length].copy_(own[0])
    local = as_dtensor(padded[:length], mesh, parameter.shape)
    return ShardedParameter(nn.Parameter(local, requires_grad=parameter.requires_grad), padded.view(-1))
