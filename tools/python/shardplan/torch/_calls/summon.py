# SPDX-License-Identifier: Apache-2.0
"""Whole parameters for a while, between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .._model.fit import Slot, parameters_of
from .._parameters.flat import FlatUnit, flat_units
from .._parameters.flat_whole import summoned, summoned_gradients
from .._replay.applied import applied_to


def _own_part(whole: torch.Tensor, shard: DTensor) -> torch.Tensor:
    """The part of `whole` that this rank keeps."""
    part = whole
    for dim, placement in enumerate(shard.placements):
        if placement.is_replicate():
            continue
        pieces = shard.device_mesh.size(dim)
        chunks = torch.chunk(part, pieces, dim=placement.dim)
        own = shard.device_mesh.get_local_rank(dim)
        part = chunks[own] if own < len(chunks) else part.narrow(placement.dim, 0, 0)
    return part


def _bind(slots: list[Slot], parameter: nn.Parameter) -> None:
    for slot in slots:
        slot.module.register_parameter(slot.name, parameter)


def whole_copy(shard: nn.Parameter, offload_to_cpu: bool = False) -> nn.Parameter:
    """All ranks' parts in one, in memory of its own. Collective."""
    local = shard.detach()
    whole = local.full_tensor().clone() if isinstance(local, DTensor) else local.clone()
    return nn.Parameter(whole.cpu() if offload_to_cpu else whole, requires_grad=shard.requires_grad)


def _check_flags(
    flat: list[FlatUnit], writeback: bool, with_grads: bool, rank0_only: bool, offload_to_cpu: bool
) -> None:
    """Refuses combinations that FSDP1 does not take, either."""
    refused = None
    if with_grads and (not flat or not all(unit.original for unit in flat)):
        refused = "with_grads is for flat plans with original parameters (use_orig_params)"
    elif with_grads and offload_to_cpu:
        refused = "with_grads and offload_to_cpu exclude each other"
    elif writeback and rank0_only:
        refused = "rank0_only needs writeback=False: the other ranks do not see what the first one changes"
    elif offload_to_cpu and any(unit.ranks == 1 for unit in flat):
        refused = "offload_to_cpu is for units that are sharded"
    if refused:
        raise ValueError(f"shardplan: summon_full_params: {refused}")


@contextlib.contextmanager
def summon_full_params(
    model: nn.Module,
    writeback: bool = True,
    with_grads: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
) -> Iterator[None]:
    """Inside, the modules of an applied plan hold whole parameters, in the dtype that they have between steps.

    writeback: what was changed in them, the same on all ranks, is there afterwards; otherwise changes are dropped.
    with_grads: the same for their gradients; for flat plans with original parameters.
    rank0_only: only the first of the ranks that share a parameter holds it whole, the others hold their shards.
    offload_to_cpu: the whole parameters are in host memory.
    Collective; only between steps; the model cannot run inside.
    """
    runtime = applied_to(model).runtime
    if not runtime.between_steps:
        raise RuntimeError("shardplan: summon_full_params works between steps only; a forward waits for its backward")
    flat = flat_units(model)
    _check_flags(flat, writeback, with_grads, rank0_only, offload_to_cpu)
    seen = {id(parameter) for unit in flat for parameter in unit.visible}
    found = list({id(p): p for p in parameters_of(model).values() if id(p.parameter) not in seen}.values())
    runtime.suspend("the model cannot run inside summon_full_params")
    sharded = [entry.slots[0].module._parameters[entry.slots[0].name] for entry in found]
    try:
        wholes = [whole_copy(shard, offload_to_cpu) for shard in sharded]
        for entry, shard, whole in zip(found, sharded, wholes):
            if not (rank0_only and isinstance(shard, DTensor) and any(shard.device_mesh.get_coordinate())):
                _bind(entry.slots, whole)
        with (
            summoned_gradients(flat if with_grads else [], writeback) as (show, hide),
            summoned(flat, writeback, rank0_only, offload_to_cpu),
        ):
            show()
            yield
            hide()
        if writeback:
            with torch.no_grad():
                for shard, whole in zip(sharded, wholes):
                    part = _own_part(whole, shard) if isinstance(shard, DTensor) else whole
                    (shard.to_local() if isinstance(shard, DTensor) else shard).copy_(part)
    finally:
        for entry, shard in zip(found, sharded):
            _bind(entry.slots, shard)
        runtime.suspend("")
