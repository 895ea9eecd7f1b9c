# SPDX-License-Identifier: Apache-2.0
"""Process groups, and the device mesh that a strategy asks for."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from shardplan_conformance.case import CaseError


def _forget_meshes() -> None:
    """DTensor remembers a mesh without its process group; the next group's mesh can be equal."""
    _clear_sharding_prop_cache()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor"):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


@contextlib.contextmanager
def process_group(**arguments) -> Iterator[None]:
    dist.init_process_group(**arguments)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


@contextlib.contextmanager
def fake_process_group(ranks: int) -> Iterator[None]:
    """Rank 0 of a group whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with process_group(backend="fake", store=FakeStore(), rank=0, world_size=ranks):
        yield


def device_mesh(strategy: dict, ranks: int) -> DeviceMesh:
    """The mesh of all ranks. Call inside a process group."""
    dimensions = strategy.get("mesh") or [{"name": "shard", "size": ranks}]
    product = 1
    for dimension in dimensions:
        product *= dimension["size"]
    if product != ranks:
        raise CaseError(f"/mesh: {product} ranks; the case has {ranks}")
    names = tuple(dimension["name"] for dimension in dimensions)
    return init_device_mesh("cpu", tuple(dimension["size"] for dimension in dimensions), mesh_dim_names=names)
