# SPDX-License-Identifier: Apache-2.0
"""Flat units whole for a while, between steps: for summon_full_params and state dicts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn as nn

from .flat import FLAT_NAME, FlatUnit


@torch.no_grad()
def gather(flat: FlatUnit) -> torch.Tensor:
    """The flat parameter in the dtype that it has between steps: 1-D, its padding included. Collective."""
    flat.write_back()
    shard = flat.shard.to(flat.device)
    whole = shard.new_empty(flat.ranks * shard.numel())
    if flat.ranks == 1:
        return whole.copy_(shard)
    dist.all_gather_into_tensor(whole, shard, group=flat.group)
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


@torch.no_grad()
def _gather_gradient(flat: FlatUnit) -> torch.Tensor | None:
    """The whole flat gradient, zeros where a rank has none; None when no rank has any. Collective."""
    grads = [parameter.grad for parameter in flat.visible]
    without = torch.tensor([all(grad is None for grad in grads)], dtype=torch.int32, device=flat.device)
    dist.all_reduce(without, group=flat.group)
    if without.item() == flat.ranks:
        return None
    own = torch.zeros_like(flat.shard, device=flat.device)
    for position, grad in enumerate(grads):
        offset, numel = flat.slice_of(position)
        if grad is not None and numel > 0:
            own[offset : offset + numel].copy_(grad.view(-1))
    whole = own.new_empty(flat.ranks * own.numel())
    dist.all_gather_into_tensor(whole, own, group=flat.group)
    return whole


@contextlib.contextmanager
def summoned_gradients(units: list[FlatUnit], writeback: bool) -> Iterator[tuple[Callable, Callable]]:
    """Around `summoned`: gives functions that show and hide the whole .grad of original parameters inside of it."""
    kept = []
    for flat in units:
        if flat.original and flat.ranks > 1 and flat.parameters:
            kept.append((flat, [parameter.grad for parameter in flat.visible], _gather_gradient(flat)))
    for flat, _, _ in kept:
        for parameter in flat.visible:
            parameter.grad = None

    def show() -> None:
        for flat, _, whole in kept:
            if whole is not None:
                for found, view in zip(flat.parameters, _views(flat, whole)):
                    found.parameter.grad = view

    def hide() -> None:
        for flat, _, _ in kept:
            for found in flat.parameters:
                found.parameter.grad = None

    try:
        yield show, hide
    finally:
        for flat, grads, whole in kept:
            begin = flat.index * flat.shard.numel()
            for position, (parameter, grad) in enumerate(zip(flat.visible, grads)):
                offset, numel = flat.slice_of(position)
                if writeback and whole is not None and grad is not None and numel > 0:
                    grad.copy_(whole[begin + offset : begin + offset + numel].view_as(grad))
                parameter.grad = grad


@contextlib.contextmanager
def summoned(
    units: list[FlatUnit], writeback: bool, rank0_only: bool = False, offload_to_cpu: bool = False
) -> Iterator[list[torch.Tensor]]:
    """Inside, the units' modules hold whole nn.Parameters under their own names. writeback: what was changed in them,
    the same on all ranks, is in the slices afterwards. rank0_only: on the first of the ranks that share a unit; the
    others hold what they do between steps. offload_to_cpu: they are in host memory. Gives the flat parameters.
    Collective."""
    units = [flat for flat in units if flat.parameters]
    wholes = [gather(flat) for flat in units]
    if rank0_only:
        kept = [flat.is_first for flat in units]
        units, wholes = ([item for item, keep in zip(items, kept) if keep] for items in (units, wholes))
    if offload_to_cpu:
        wholes = [whole.cpu() for whole in wholes]
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
