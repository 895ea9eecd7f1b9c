"""The ranks a plan runs on: its mesh as a DeviceMesh, its communicators as process groups."""

from __future__ import annotations

import itertools
import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ._errors import PlanError


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
                f"the plan is for a world size of {math.prod(sizes)} ({_describe(dims)}), found {dist.get_world_size()} "
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


def _partition(communicator, ranks: list[int]) -> list[list[int]]:
    """All groups of a communicator: the ranks that differ only in the digit (place / stride) mod size."""
    groups: dict[int, list[int]] = {}
    for place, rank in enumerate(ranks):
        digit = (place // communicator.stride) % communicator.size
        groups.setdefault(place - digit * communicator.stride, []).append(rank)
    return list(groups.values())


def process_groups(plan, mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """One group per communicator of the plan: the mesh's own where it has it, a new one otherwise. Collective."""
    own_rank = dist.get_rank()
    ranks = mesh.mesh.flatten().tolist()
    mesh_groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    result = []
    for communicator in plan.communicators:
        groups = _partition(communicator, ranks)
        own = next(group for group in groups if own_rank in group)
        existing = next((g for g in mesh_groups if dist.get_process_group_ranks(g) == own), None)
        result.append(existing or dist.new_subgroups_by_enumeration(groups)[0])
    return result


def timeout_s(mesh: DeviceMesh) -> float:
    """After how long without an answer a collective of the mesh's groups fails."""
    backend = mesh.get_group(mesh.ndim - 1)._get_backend(torch.device(mesh.device_type))
    options = backend.options
    return (options._timeout if options else dist.default_pg_timeout).total_seconds()


_side_channels = itertools.count()


def side_channel() -> dist.Store | None:
    """A part of the default group's store for one applied plan: ranks tell there how far they came."""
    number = next(_side_channels)
    if dist.get_backend() == "fake":  # its store answers nothing
        return None
    return dist.PrefixStore(f"shardplan/{number}", dist.distributed_c10d._get_default_store())
