# SPDX-License-Identifier: Apache-2.0
"""Gradient clipping by the norm of all gradients of all ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn as nn

from .._parameters.flat import flat_units


def _local_norm(gradients: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """In float32, whatever the gradients' dtypes are."""
    if not gradients:
        return torch.zeros((), device=device)
    norms = [torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float32) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type, dtype=torch.float32)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad.detach() for parameter in parameters if parameter.grad is not None]


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scales all gradients so that their norm, as one vector over all ranks, is at most max_norm; returns the norm
    before.

    All ranks have to call it. With units of a flat layout (fsdp1) this is what FullyShardedDataParallel.clip_grad_norm_
    does, in its order: norms are summed in float32, sharded gradients over the ranks that share them, others once.
    Without any it is torch.nn.utils.clip_grad_norm_, which knows DTensors.
    """
    sharded = [flat for flat in flat_units(model) if flat.ranks > 1]
    if not sharded:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    for flat in sharded:
        flat.write_back()
    norm_type = float(norm_type)
    sliced = {id(p): p for flat in sharded for p in flat.visible}
    others = [p for p in model.parameters() if id(p) not in sliced]
    device = sharded[0].shard.device
    gradients = [_gradients(sliced.values()), _gradients(others)]
    total = _local_norm(gradients[0], norm_type, device)
    whole = _local_norm(gradients[1], norm_type, device) if others else None
    if norm_type == math.inf:
        total = total if whole is None else torch.maximum(total, whole)
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=sharded[0].group)
    else:
        total = total**norm_type
        dist.all_reduce(total, group=sharded[0].group)
        if whole is not None:
            total += whole**norm_type
        total = total ** (1.0 / norm_type)
    coefficient = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    everything = [*gradients[0], *gradients[1]]
    for gradient in everything:
        gradient.mul_(coefficient.to(gradient.device, gradient.dtype))
    if not everything:
        return total
    return total.to(functools.reduce(torch.promote_types, [gradient.dtype for gradient in everything]))
