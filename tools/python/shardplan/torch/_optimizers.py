"""Optimizers of applied models: the runtimes learn when one steps, wherever the loop calls it."""

from __future__ import annotations

import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ._applied import Applied

_APPLIED: list[weakref.ref] = []  # in the order of apply
_HOOKS: list = []  # torch's hook for all optimizers is process-wide; so is what finds the models that it is for


def _trains(optimizer: torch.optim.Optimizer, applied: Applied) -> bool:
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


def _before_step(optimizer: torch.optim.Optimizer, _args, _kwargs) -> None:
    for reference in list(_APPLIED):
        applied = reference()
        if applied is not None and _trains(optimizer, applied):
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
