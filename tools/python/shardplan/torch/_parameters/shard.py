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
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .._job.arguments import PlanError
from .._job.mesh import OwnMesh
from .._model.annotated import Annotation, annotation_of


@dataclasses.dataclass
class ShardedParameter:
    """One parameter's part on a rank.

    shard: what the modules hold between steps, a DTensor whose local tensor is the first rows of `padded`.
    padded: flat, the size of the first rank's piece, zeros after this rank's own: what is gathered.
    spec: of `shard`.
    whole_spec: of a DTensor parameter (cut over dimensions of the mesh that are not FSDP's), its own spec.
    annotation: of a plain one that spmd_types annotates; whole_spec is that of its storage.
    """

    shard: nn.Parameter
    padded: torch.Tensor
    spec: DTensorSpec
    whole_spec: DTensorSpec | None = None
    own_dims: tuple[int, ...] = ()  # of whole_spec's mesh, which are FSDP's: its reductions add up along them
    annotation: Annotation | None = None


def _spec(parameter: nn.Parameter, whole: DTensorSpec | None, own: OwnMesh, shard_dim: int) -> DTensorSpec:
    """The sharded parameter's spec: FSDP's dimensions, then those that the parameter is cut over already. whole: of the
    parameter as it is."""
    placements = [Replicate()] * own.mesh.ndim
    if own.shards:
        placements[-1] = Shard(shard_dim)
    if whole is None:
        meta = TensorMeta(parameter.shape, parameter.stride(), parameter.dtype)
        return DTensorSpec(own.mesh, tuple(placements), meta)
    if own.whole is not None:
        return _spec_on_whole(whole, own, shard_dim)
    pieces = whole.num_shards_map[shard_dim]
    if own.shards and pieces > 1:
        placements[-1] = _StridedShard(shard_dim, split_factor=pieces)
    joined = DeviceMesh._concatenate([own.mesh, whole.mesh])
    return DTensorSpec(joined, (*placements, *whole.placements), whole.tensor_meta)


def _on_whole(spec: DTensorSpec | None, own: OwnMesh) -> OwnMesh:
    """With FSDP's dimensions among those of the parameter's own mesh (dp_mesh_dims), where they are: a plan does not
    say which mesh its dimensions are of."""
    names, of_fsdp = (spec.mesh.mesh_dim_names if spec else None) or (), own.mesh.mesh_dim_names or ()
    if own.whole is not None or not of_fsdp or not set(of_fsdp) <= set(names):
        return own
    positions = tuple(names.index(name) for name in of_fsdp)
    shard = positions[-1:] if own.shards else ()
    return dataclasses.replace(own, whole=spec.mesh, replicate=positions[: len(positions) - len(shard)], shard=shard)


def _spec_on_whole(spec: DTensorSpec, own: OwnMesh, shard_dim: int) -> DTensorSpec:
    """FSDPParam._init_sharding_spec_spmd: the parameter is replicated over FSDP's dimensions, and cut over one of them
    from now on. Several of them are one in its mesh."""
    names = spec.mesh.mesh_dim_names
    placements = list(spec.placements)
    for dim in (*own.replicate, *own.shard):
        if not isinstance(placements[dim], Replicate):
            raise PlanError(
                f"with dp_mesh_dims parameters are replicated over {names[dim]}, and one is placed {placements[dim]} "
                "there"
            )
    if not own.shard:
        return spec
    first = own.shard[0]
    behind = [
        i
        for i in range(first + 1, spec.mesh.ndim)
        if isinstance(placements[i], (Shard, _StridedShard)) and placements[i].dim == shard_dim
    ]
    pieces = math.prod(spec.mesh.size(i) for i in behind)
    placements[first] = _StridedShard(shard_dim, split_factor=pieces) if pieces > 1 else Shard(shard_dim)
    if len(own.shard) == 1:
        return DTensorSpec(spec.mesh, tuple(placements), spec.tensor_meta)
    meshes: list[DeviceMesh] = []
    joined: list[Placement] = []
    for dim, name in enumerate(names):
        if dim == first:
            meshes.append(own.mesh)
            joined += [Replicate()] * (own.mesh.ndim - 1) + [placements[dim]]
        elif dim not in own.shard and dim not in own.replicate:
            meshes.append(spec.mesh[name])
            joined.append(placements[dim])
    return DTensorSpec(DeviceMesh._concatenate(meshes), tuple(joined), spec.tensor_meta)


def as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around exactly `local`; nothing is communicated or checked."""
    return DTensor(local, spec, requires_grad=False)


@torch.no_grad()
def shard_parameter(fqn: str, parameter: nn.Parameter, own: OwnMesh, shard_dim: int, host: bool) -> ShardedParameter:
    """Cuts as torch.chunk does. `parameter` holds the whole values (of a DTensor: this rank's part of them), the same
    on all ranks of FSDP's mesh. host: the shard is in host memory (pinned, where the values came from a GPU)."""
    annotation = annotation_of(fqn, parameter, own)
    whole_spec = annotation.spec if annotation else getattr(parameter, "_spec", None)
    own = _on_whole(whole_spec, own)
    spec = _spec(parameter, whole_spec, own, shard_dim)
    whole = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()
    ranks, place = own.ranks, own.mesh.get_local_rank(own.mesh.ndim - 1) if own.shards else 0
    if shard_dim > 0 and whole.shape[shard_dim] % ranks != 0:
        raise PlanError(
            f"a parameter of shape {list(whole.shape)} cannot be cut evenly on dim {shard_dim} by {ranks} ranks"
        )
    part = list(torch.chunk(whole, ranks, dim=shard_dim))[place:][:1]
    length = part[0].shape[shard_dim] if part else 0
    shape = list(whole.shape)
    shape[shard_dim] = math.ceil(shape[shard_dim] / ranks)
    padded = whole.new_zeros(shape)
    if part:
        padded.narrow(shard_dim, 0, length).copy_(part[0])
    if host and padded.device.type != "cpu":
        padded = padded.cpu().pin_memory()
    local = as_dtensor(padded.narrow(shard_dim, 0, length), spec)
    shard = nn.Parameter(local, requires_grad=parameter.requires_grad)
    own_dims = (*own.replicate, *own.shard) if whole_spec is not None and own.whole is not None else ()
    return ShardedParameter(shard, padded.view(-1), spec, whole_spec, own_dims, annotation)


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
    plain = sharded.whole_spec is None or sharded.annotation is not None
    data = view if plain else as_dtensor(view, sharded.whole_spec)
    made = nn.Parameter(data, requires_grad=sharded.shard.requires_grad)
    if sharded.annotation is not None:
        sharded.annotation.restore(made)
    return made


def gradient_unwrapper(sharded: ShardedParameter):
    """gradient of the whole parameter -> the local tensor to reduce; None: it is one."""
    if sharded.whole_spec is None:
        return None
    placements, own, annotation = sharded.whole_spec.placements, sharded.own_dims, sharded.annotation

    def local_gradient(gradient: torch.Tensor) -> torch.Tensor:
        if annotation is not None:
            gradient = as_dtensor(gradient, annotation.gradient)
        wanted = tuple(
            found if dim in own else placed for dim, (found, placed) in enumerate(zip(gradient.placements, placements))
        )
        if gradient.placements != wanted:  # a partial sum over the other dimensions
            gradient = gradient.redistribute(placements=wanted)
        return gradient.to_local()

    return local_gradient
