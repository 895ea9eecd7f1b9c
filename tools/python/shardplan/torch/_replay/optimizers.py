# SPDX-License-Identifier: Apache-2.0
"""Optimizers of applied models: the runtimes learn when one steps, wherever the loop calls it."""

from __future__ import annotations

import warnings
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .applied import Applied

_APPLIED: list[weakref.ref] = []  # in the order of apply
_HOOKS: list = []  # torch's hook for all optimizers is process-wide; so is what finds the models that it is for


def trains(optimizer: torch.optim.Optimizer, applied: Applied) -> bool:
    """Has it a parameter of the model?"""
    if optimizer in applied.optimizers:
        return True
    own = {id(parameter) for parameter in applied.model.parameters()}
    for flat in applied.flat_units():
        own.update(id(parameter) for parameter in flat.visible)
    found = any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
    if found:
        applied.optimizers.add(optimizer)
    return found


_warned: weakref.WeakSet = weakref.WeakSet()


def _warn_of_replaced(optimizer: torch.optim.Optimizer, applied: Applied) -> None:
    """An optimizer that was made before the plan was applied steps parameters that no module has any more."""
    if optimizer in _warned or optimizer in applied.optimizers or not applied.replaced:
        return
    stale = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (known := applied.replaced.get(id(parameter))) is not None and known() is parameter
    ]
    if stale:
        _warned.add(optimizer)
        warnings.warn(
            f"shardplan: this {type(optimizer).__name__} was made before the plan was applied: {len(stale)} of its "
            "parameters are not the model's any "
            "more, and are not trained. Make the optimizer after shardplan.torch.apply (auto), as after fully_shard",
            stacklevel=4,
        )


def _before_step(optimizer: torch.optim.Optimizer, _args, _kwargs) -> None:
    for reference in list(_APPLIED):
        applied = reference()
        if applied is None:
            continue
        _warn_of_replaced(optimizer, applied)
        if trains(optimizer, applied):
            applied.runtime.optimizer_steps()
            if applied.setters is not None:
                applied.setters.optimizer_steps()


def watch(applied: Applied) -> None:
    """From now on the runtime of `applied` is told before an optimizer of its parameters steps."""
    if not _APPLIED:  # torch keeps one entry for each registration, so it is taken back with the last model
        _HOOKS.append(register_optimizer_step_pre_hook(_before_step))
    _APPLIED.append(weakref.ref(applied))


def forget(applied: Applied) -> None:
    """The reverse of `watch`."""
    _APPLIED[:] = [reference for reference in _APPLIED if reference() is not None and reference() is not applied]
    if not _APPLIED:
        while _HOOKS:
            _HOOKS.pop().remove()
