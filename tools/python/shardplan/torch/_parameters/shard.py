# SPDX-License-Identifier: Apache-2.0
"""Sharded parameters, laid out as FSDP2 lays them out."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from .._job.arguments import PlanError


@dataclasses.dataclass
class ShardedParameter:
    """One parameter's part on a rank.

    shard: what the modules hold between steps, a DTensor whose local tensor is the first rows of `padded`.
    padded: flat, the size of the first rank's piece, zeros after this rank's own: what is gathered.
    spec: of `shard`.
    whole_spec: of a DTensor parameter (cut over dimensions of the mesh that are not FSDP's), its own spec.
    """

    shard: nn.Parameter
    padded: torch.Tensor
    spec: DTensorSpec
    whole_spec: DTensorSpec | None = None
    own_dims: tuple[int, ...] = ()  # of whole_spec's mesh, which are FSDP's: its reductions add up along them


def _spec(parameter: nn.Parameter, mesh: DeviceMesh, shards: bool, shard_dim: int) -> DTensorSpec:
    """The sharded parameter's spec: FSDP's dimensions, then those that the parameter is cut over already."""
    placements = [Replicate()] * mesh.ndim
    if shards:
        placements[-1] = Shard(shard_dim)
    if not isinstance(parameter, DTensor):
        return DTensorSpec(mesh, tuple(placements), TensorMeta(parameter.shape, parameter.stride(), parameter.dtype))
    spec = parameter._spec
    if own := own_dims(spec, mesh):
        return _spec_on_own_mesh(spec, own[-1] if shards else None, shard_dim, own)
    pieces = spec.num_shards_map[shard_dim]
    if shards and pieces > 1:
        placements[-1] = _StridedShard(shard_dim, split_factor=pieces)
    joined = DeviceMesh._concatenate([mesh, spec.mesh])
    return DTensorSpec(joined, (*placements, *spec.placements), spec.tensor_meta)


def own_dims(spec: DTensorSpec, mesh: DeviceMesh) -> list[int]:
    """Positions of FSDP's dimensions among those of the parameter's own mesh (dp_mesh_dims); [] if they are apart."""
    names, of_fsdp = spec.mesh.mesh_dim_names or (), mesh.mesh_dim_names or ()
    return [names.index(name) for name in of_fsdp] if of_fsdp and set(of_fsdp) <= set(names) else []


def _spec_on_own_mesh(spec: DTensorSpec, shard: int | None, shard_dim: int, own: list[int]) -> DTensorSpec:
    """FSDPParam._init_sharding_spec_spmd: the parameter is replicated over FSDP's dimensions, and cut over one of them
    from now on."""
    names = spec.mesh.mesh_dim_names
    placements = list(spec.placements)
    for dim in own:
        if not isinstance(placements[dim], Replicate):
            raise PlanError(
                f"with dp_mesh_dims parameters are replicated over {names[dim]}, and one is placed {placements[dim]} "
                "there"
            )
    if shard is not None:
        behind = [
            i
            for i in range(shard + 1, spec.mesh.ndim)
            if isinstance(placements[i], (Shard, _StridedShard)) and placements[i].dim == shard_dim
        ]
        pieces = math.prod(spec.mesh.size(i) for i in behind)
        placements[shard] = _StridedShard(shard_dim, split_factor=pieces) if pieces > 1 else Shard(shard_dim)
    return DTensorSpec(spec.mesh, tuple(placements), spec.tensor_meta)


def as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around exactly `local`; nothing is communicated or checked."""
    return DTensor(local, spec, requires_grad=False)


@torch.no_grad()
def shard_parameter(
    parameter: nn.Parameter, mesh: DeviceMesh, shards: bool, shard_dim: int, host: bool
) -> ShardedParameter:
    """Cuts as torch.chunk does. `parameter` holds the whole values (of a DTensor: this rank's part of them), the same
    on all ranks of `mesh`, FSDP's own: cut over its last dimension if it `shards`. host: the shard is in host memory
    (pinned, where the values came from a GPU)."""
    spec = _spec(parameter, mesh, shards, shard_dim)
    whole = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()
    ranks, place = (mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)) if shards else (1, 0)
    if shard_dim > 0 and whole.shape[shard_dim] % ranks != 0:
        raise PlanError(
            f"a parameter of shape {list(whole.shape)} cannot be cut evenly on dim {shard_dim} by {ranks} ranks"
        )
    own = list(torch.chunk(whole, ranks, dim=shard_dim))[place:][:1]
    length = own[0].shape[shard_dim] if own else 0
    shape = list(whole.shape)
    shape[shard_dim] = math.ceil(shape[shard_dim] / ranks)
    padded = whole.new_zeros(shape)
    if own:
        padded.narrow(shard_dim, 0, length).copy_(own[0])
    if host and padded.device.type != "cpu":
        padded = padded.cpu().pin_memory()
    local = as_dtensor(padded.narrow(shard_dim, 0, length), spec)
    shard = nn.Parameter(local, requires_grad=parameter.requires_grad)
    if not isinstance(parameter, DTensor):
        return ShardedParameter(shard, padded.view(-1), spec)
    return ShardedParameter(shard, padded.view(-1), spec, parameter._spec, tuple(own_dims(parameter._spec, mesh)))


@torch.no_grad()
def adopt_parameter(expected, sharded: ShardedParameter, found) -> None:
    """`found` is what modules hold now in place of the sharded parameter (Module.to, load_state_dict(assign=True)): its
    values go into our memory, which becomes its own, as FSDP2 does. Raises PlanError for one that the plan does not
    fit."""
    if not isinstance(found, DTensor):
        raise PlanError(
            f"parameter {expected.fqn} was replaced by a {type(found).__name__}: expected a DTensor like the one that "
            "shardplan.torch.apply made"
        )
    meta, new = sharded.spec.tensor_meta, found._spec.tensor_meta
    for what, wanted, is_now in (
        ("dtype", meta.dtype, new.dtype),
        ("shape", list(meta.shape), list(new.shape)),
        ("placements", sharded.spec.placements, found.placements),
    ):
        if wanted != is_now:
            raise PlanError(
                f"parameter {expected.fqn} was changed after shardplan.torch.apply: {what} expected {wanted}, found "
                f"{is_now}. "
                "Change it before, and trace and plan the model again"
            )
    sharded.shard = found
    local = found._local_tensor
    if expected.gathered:  # an extension, which is asked anew each time
        return
    kept = sharded.padded[: local.numel()].view(local.shape)
    if local.data_ptr() != kept.data_ptr():
        kept.copy_(local)
        found._local_tensor = kept


def whole_parameter(view: torch.Tensor, sharded: ShardedParameter) -> nn.Parameter:
    """The parameter that modules hold while the unit is gathered: an autograd leaf over `view`."""
    data = view if sharded.whole_spec is None else as_dtensor(view, sharded.whole_spec)
    return nn.Parameter(data, requires_grad=sharded.shard.requires_grad)


def gradient_unwrapper(sharded: ShardedParameter):
    """gradient of the whole parameter -> the local tensor to reduce; None: it is one."""
    if sharded.whole_spec is None:
        return None
    placements, own = sharded.whole_spec.placements, sharded.own_dims

    def local_gradient(gradient: DTensor) -> torch.Tensor:
        wanted = tuple(
            found if dim in own else placed for dim, (found, placed) in enumerate(zip(gradient.placements, placements))
        )
        if gradient.placements != wanted:  # a partial sum over the other dimensions
            gradient = gradient.redistribute(placements=wanted)
        return gradient.to_local()

    return local_gradient
