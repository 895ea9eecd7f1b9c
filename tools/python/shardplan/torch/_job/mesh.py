# SPDX-License-Identifier: Apache-2.0
"""The ranks a plan runs on: its mesh as a DeviceMesh, its communicators as process groups."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .arguments import PlanError, default_timeout_s
from .store import job_store


@dataclasses.dataclass(frozen=True)
class OwnMesh:
    """FSDP's dimensions, as fully_shard makes them of its `mesh` and `dp_mesh_dims`.

    mesh: the one to replicate over, where there is one, then the one to shard over. shards: there is one to shard over.
    whole: the mesh that `dp_mesh_dims` names dimensions of, on which parameters lie. replicate, shard: their positions
    there.
    """

    mesh: DeviceMesh
    shards: bool = True
    whole: DeviceMesh | None = None
    replicate: tuple[int, ...] = ()
    shard: tuple[int, ...] = ()

    @staticmethod
    def of(mesh: DeviceMesh, dims) -> OwnMesh:
        """dims: DataParallelMeshDims, or None. Collective where several dimensions become one."""
        if dims is None:
            return OwnMesh(mesh)
        names = mesh.mesh_dim_names or ()
        if unknown := [name for name in (*dims.shard_names, *dims.replicate_names) if name not in names]:
            raise PlanError(
                f"dp_mesh_dims names {', '.join(unknown)}, and the mesh has the dimensions {', '.join(names)}"
            )
        from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info  # 2.15

        return OwnMesh.of_info(_get_mesh_info(mesh, dims), mesh, dims)

    @staticmethod
    def of_info(info, mesh: DeviceMesh | None, dims) -> OwnMesh:
        """info: torch's FSDPMeshInfo, of shard_placement_fn, say."""
        if mesh is None or dims is None:
            return OwnMesh(info.mesh, info.shard_mesh_dim is not None)
        names = mesh.mesh_dim_names
        replicate, shard = (tuple(names.index(name) for name in of) for of in (dims.replicate_names, dims.shard_names))
        return OwnMesh(info.mesh, bool(shard), mesh, replicate, shard)

    @property
    def ranks(self) -> int:
        """How many a parameter is sharded over."""
        return self.mesh.size(self.mesh.ndim - 1) if self.shards else 1


Given = Mapping[str, OwnMesh]  # by FQN of a parameter: what the user's own calls say


def _plan_dims(plan) -> list[tuple[str, int]]:
    """(name, size) outermost first; a plan without a mesh has one shard dimension of all its ranks."""
    return [(dim.name, dim.size) for dim in plan.mesh] or [("shard", plan.world_size)]


def _describe(dims: list[tuple[str, int]]) -> str:
    return " x ".join(f"{name} {size}" for name, size in dims)


def resolve_mesh(plan, mesh: DeviceMesh | None, device: torch.device) -> DeviceMesh:
    """`mesh`, or a mesh of the default group's ranks; raises PlanError unless its sizes are the plan's."""
    dims = _plan_dims(plan)
    sizes = tuple(size for _, size in dims)
    if not dist.is_initialized():
        raise PlanError(
            f"the plan is for {plan.world_size} ranks, but torch.distributed is not initialized: call "
            "torch.distributed.init_process_group before shardplan.torch.apply"
        )
    if mesh is None:
        if dist.get_world_size() != math.prod(sizes):
            raise PlanError(
                f"the plan is for a world size of {math.prod(sizes)} ({_describe(dims)}), found "
                f"{dist.get_world_size()} "
                f"ranks: plan again with a cluster of {dist.get_world_size()} ranks, or start {math.prod(sizes)}"
            )
        return init_device_mesh(device.type, sizes, mesh_dim_names=tuple(name for name, _ in dims))
    if mesh.device_type != device.type:
        raise PlanError(f"the mesh is of device type {mesh.device_type}, the model's parameters are on {device.type}")
    found = tuple(mesh.mesh.shape)
    if found != sizes:
        names = mesh.mesh_dim_names or tuple(f"dim {i}" for i in range(len(found)))
        raise PlanError(
            f"the plan is for a mesh of {_describe(dims)} (world size {math.prod(sizes)}), found "
            f"{_describe(list(zip(names, found)))} (world size {math.prod(found)})"
        )
    return mesh


def mesh_rank(mesh: DeviceMesh) -> int:
    """This rank's place in the flattened mesh: the number whose digits the plan's communicators are made of."""
    return mesh.mesh.flatten().tolist().index(dist.get_rank())


def mesh_of_ranks(ranks: Sequence[int], dims: Sequence[tuple[str, int]], device_type: str) -> DeviceMesh:
    """A mesh that only says where ranks are: groups are those of the meshes that the user has. dims: name and size, the
    outermost first."""
    numbers = torch.tensor(ranks, dtype=torch.int).view([size for _, size in dims])
    return DeviceMesh(device_type, numbers, mesh_dim_names=tuple(name for name, _ in dims), _init_backend=False)


def _groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Groups of its dimensions, and of what was flattened from its root."""
    found = []
    for own in (mesh, *mesh._get_root_mesh()._flatten_mapping.values()):
        with contextlib.suppress(RuntimeError):  # a mesh without process groups
            found += own.get_all_groups()
    return found


def process_groups(
    plan, mesh: DeviceMesh, given: Iterable[OwnMesh], made: dict, timeout_s: float
) -> list[dist.ProcessGroup]:
    """One group per communicator of the plan: one of the meshes (or of those flattened from them), else one that was
    `made` before (ranks of all groups -> this rank's). A new one is put there. Collective."""
    own_rank = dist.get_rank()
    ranks = mesh.mesh.flatten().tolist()
    meshes = {id(found): found for found in (mesh, *(own.mesh for own in given))}
    mesh_groups = [group for found in meshes.values() for group in _groups_of(found)]
    result = []
    for communicator in plan.communicators:
        groups = [communicator.group_of(place) for place in range(len(ranks))]
        partition = [[ranks[place] for place in group] for first, group in enumerate(groups) if group[0] == first]
        own = next(group for group in partition if own_rank in group)
        existing = next((g for g in mesh_groups if dist.get_process_group_ranks(g) == own), None)
        key = tuple(map(tuple, partition))
        if existing is None and key not in made:
            timeout = datetime.timedelta(seconds=timeout_s)
            made[key] = dist.new_subgroups_by_enumeration(partition, timeout=timeout)[0]
        result.append(existing or made[key])
    return result


def _flattened(mesh: DeviceMesh, dims: list[int]) -> DeviceMesh:
    """The one-dimensional mesh of these dimensions: one that the user flattened already, if there is. Collective."""
    part = mesh[tuple(mesh.mesh_dim_names[dim] for dim in dims)]
    if part.ndim == 1:
        return part
    ranks = part.mesh.flatten()
    known = part._get_root_mesh()._flatten_mapping.values()
    return next((made for made in known if torch.equal(made.mesh.flatten(), ranks)), None) or part._flatten()


def data_parallel_mesh(plan, named, mesh: DeviceMesh) -> OwnMesh:
    """FSDP's own mesh, what fully_shard is given: one dimension to replicate over where there are such dimensions, one
    to shard over likewise, in this order; several of either are flattened into one. Collective.

    named: which dimensions of the plan's mesh these are, or None: those named so.
    """
    names = [name for name, _ in _plan_dims(plan)]
    if named is None:
        wanted = [[name for name in names if name == kind] for kind in ("replicate", "shard")]
    else:
        wanted = [[name for name in names if name in kind] for kind in (named.replicate, named.shard)]
    dims = [[names.index(name) for name in kind] for kind in wanted if kind]
    shards = bool(wanted[1])
    if dims == [[dim] for dim in range(mesh.ndim)]:
        return OwnMesh(mesh, shards)
    if mesh.mesh_dim_names is None:
        raise PlanError("the mesh needs names for its dimensions (mesh_dim_names)")
    parts = [_flattened(mesh, group) for group in dims]
    return OwnMesh(parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts), shards)


_side_channels = itertools.count()


def side_channel() -> dist.Store | None:
    """A part of the default group's store for one applied plan: ranks tell there how far they came."""
    number = next(_side_channels)
    if dist.get_backend() == "fake":  # its store answers nothing
        return None
    return dist.PrefixStore(f"plan/{number}", job_store(default_timeout_s()))
