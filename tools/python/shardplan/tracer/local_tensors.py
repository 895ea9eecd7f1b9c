# SPDX-License-Identifier: Apache-2.0
"""Distributed tensors: what this rank has of one, and where it lies.

Tensor and expert parallelism wrap a rank's part in a DTensor, and what a collective still works on in an
AsyncCollectiveTensor. A trace is of the parts: the operators on them, collectives included, are those that a wrapper
calls in its turn.
"""

from __future__ import annotations

import torch

_WRAPPERS = ("DTensor", "AsyncCollectiveTensor")


def is_wrapper(kind: type) -> bool:
    return any(base.__name__ in _WRAPPERS and base.__module__.startswith("torch.distributed") for base in kind.__mro__)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part; a plain tensor itself."""
    while is_wrapper(type(tensor)):
        tensor = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor.elem
    return tensor


def with_local(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """`part` in place of the rank's part of `tensor`."""
    if not hasattr(tensor, "_local_tensor"):
        return part
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = tensor._spec
    meta = TensorMeta(tensor.shape, tensor.stride(), part.dtype)
    return DTensor(part, DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False)


def placements(tensor: torch.Tensor) -> list[dict]:
    """The placements of a trace document, the outermost mesh dimension first; empty for a plain tensor."""
    if not hasattr(tensor, "_local_tensor"):
        return []
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or [f"dim{i}" for i in range(mesh.ndim)]
    entries = []
    for dimension, placement in enumerate(tensor.placements):
        entry: dict = {"mesh_dim": names[dimension], "size": mesh.size(dimension)}
        if hasattr(placement, "dim"):
            entry["dim"] = placement.dim
        entries.append(entry)
    return entries


def note_partial_gradient(entry: dict, parameter: torch.Tensor) -> None:
    """In a parameter's document entry: along which mesh dimensions its gradient comes as a partial sum."""
    gradient = parameter.grad
    if not hasattr(gradient, "_local_tensor") or not hasattr(parameter, "_local_tensor"):
        return
    for placed, own, found in zip(entry["placements"], parameter.placements, gradient.placements):
        if own.is_replicate() and found.is_partial():
            placed["grad_partial"] = True
