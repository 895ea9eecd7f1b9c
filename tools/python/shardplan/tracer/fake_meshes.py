# SPDX-License-Identifier: Apache-2.0
"""Device meshes of a model that is traced: made, cut and folded outside fake mode (a mesh looks into a tensor of
ranks), and of CUDA devices whatever they say.

The styles of tensor parallelism move tensors to their mesh's device, which is where everything is that a trace works
on.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

# Methods that make a mesh of a mesh; a release need not have all of them.
_DERIVED = ("__getitem__", "_flatten", "_unflatten", "_get_all_submeshes")

_made: list[DeviceMesh] = []  # inside of fake_meshes: a builder need not keep its mesh


def join_fake_group(ranks: int) -> None:
    """Makes this process rank 0 of a fake process group of so many ranks; a group of another size ends."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized() and dist.get_world_size() != ranks:
        dist.destroy_process_group()
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def known_meshes() -> list[DeviceMesh]:
    """Meshes made inside of fake_meshes, or there before. Meshes with named dimensions come first, and the more
    dimensions a mesh has, the earlier."""
    # isinstance would ask a dead weakref.proxy, which raises, and lazy modules, which import.
    there = [thing for thing in gc.get_objects() if issubclass(type(thing), DeviceMesh)]
    different = {id(mesh): mesh for mesh in (*_made, *there)}
    return sorted(
        different.values(), key=lambda mesh: (mesh.mesh_dim_names is None, -mesh.ndim, mesh.mesh_dim_names or ())
    )


def _is_faking() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _on_ranks(method: Callable) -> Callable:
    @functools.wraps(method)
    def derive(*args, **kwargs):
        with unset_fake_temporarily(), torch.device("cpu"):
            return method(*args, **kwargs)

    return derive


@contextlib.contextmanager
def fake_meshes() -> Iterator[None]:
    make, device_type = DeviceMesh.__init__, DeviceMesh.device_type
    derived = {name: DeviceMesh.__dict__[name] for name in _DERIVED if callable(DeviceMesh.__dict__.get(name))}

    def made_of_ranks(mesh, *args, _rank_map=None, **kwargs) -> None:
        with unset_fake_temporarily(), torch.device("cpu"):
            if isinstance(_rank_map, FakeTensor):  # init_device_mesh: all ranks in their order
                _rank_map = torch.arange(_rank_map.numel(), dtype=torch.int)
            make(mesh, *args, _rank_map=_rank_map, **kwargs)
            _made.append(mesh)

    DeviceMesh.__init__ = made_of_ranks
    DeviceMesh.device_type = property(lambda mesh: "cuda" if _is_faking() else device_type.fget(mesh))
    for name, method in derived.items():
        setattr(DeviceMesh, name, _on_ranks(method))
    try:
        yield
    finally:
        _made.clear()
        DeviceMesh.__init__, DeviceMesh.device_type = make, device_type
        for name, method in derived.items():
            setattr(DeviceMesh, name, method)
