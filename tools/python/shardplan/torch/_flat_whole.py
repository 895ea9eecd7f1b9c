"""Flat units whole for a while, between steps: for summon_full_params and state dicts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn as nn

from ._flat import FLAT_NAME, FlatUnit


@torch.no_grad()
def gather(flat: FlatUnit) -> torch.Tensor:
    """The flat parameter in the dtype that it has between steps: 1-D, its padding included. Collective."""
    flat.write_back()
    whole = flat.shard.new_empty(flat.ranks * flat.shard.numel())
    if flat.ranks == 1:
        return whole.copy_(flat.shard)
    dist.all_gather_into_tensor(whole, flat.shard, group=flat.group)
    return whole


def _views(flat: FlatUnit, whole: torch.Tensor) -> list[torch.Tensor]:
    views = []
    for expected in flat.unit.parameters:
        shape = torch.Size(expected.shape)
        views.append(whole[expected.flat_offset : expected.flat_offset + shape.numel()].view(shape))
    return views


def _show_original(flat: FlatUnit, whole: torch.Tensor) -> None:
    for found, view in zip(flat.parameters, _views(flat, whole)):
        found.parameter.data = view


def _hide_original(flat: FlatUnit) -> None:
    for position in range(len(flat.parameters)):
        flat.show_slice(position)


def _show_flat(flat: FlatUnit, whole: torch.Tensor) -> None:
    del flat.module._parameters[FLAT_NAME]
    for expected, slots, view in zip(flat.unit.parameters, flat.slots, _views(flat, whole)):
        parameter = nn.Parameter(view, requires_grad=expected.requires_grad)
        for slot in slots:
            setattr(slot.module, slot.name, parameter)


def _hide_flat(flat: FlatUnit) -> None:
    for position, slots in enumerate(flat.slots):
        flat.show_view(position)
    flat.module._parameters[FLAT_NAME] = flat.visible[0]


@contextlib.contextmanager
def summoned(units: list[FlatUnit], writeback: bool) -> Iterator[list[torch.Tensor]]:
    """Inside, the units' modules hold whole nn.Parameters under their own names. writeback: what was changed in them, the
    same on all ranks, is in the slices afterwards. Gives the flat parameters. Collective."""
    units = [flat for flat in units if flat.parameters]
    wholes = [gather(flat) for flat in units]
    for flat, whole in zip(units, wholes):
        (_show_original if flat.original else _show_flat)(flat, whole)
    try:
        yield wholes
        if writeback:
            for flat, whole in zip(units, wholes):
                numel = flat.shard.numel()
                flat.shard.copy_(whole[flat.index * numel : (flat.index + 1) * numel])
    finally:
        for flat in units:
            (_hide_original if flat.original else _hide_flat)(flat)
