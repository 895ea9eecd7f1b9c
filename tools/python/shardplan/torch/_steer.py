# SPDX-License-Identifier: Apache-2.0
"""What a loop says about a step that its plan may not have: micro-batches without communication, steps that are given up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.nn as nn

from ._applied import applied_above, applied_to
from ._setters import units_of


def set_requires_gradient_sync(module: nn.Module, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    """Whether backwards from now on reduce gradients or keep them for a later one, as FSDPModule.set_requires_gradient_sync.

    A plan whose step does the same is followed. One that does not is left (on_deviation): "stop" raises in the backward,
    "replan" does what was asked for on demand, and plans such steps from then on.
    """
    applied = applied_above(module)
    if applied.setters is not None:
        applied.setters.set_requires_gradient_sync(module, requires_gradient_sync, recurse)
    else:
        applied.set_sync(units_of(applied, module, recurse), requires_gradient_sync)


def set_is_last_backward(module: nn.Module, is_last_backward: bool) -> None:
    """As FSDPModule.set_is_last_backward: whether a backward forgets which modules of a group its forward has run."""
    applied_above(module).set("set_is_last_backward", value=is_last_backward)


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Inside, backwards keep their gradients, as with FullyShardedDataParallel.no_sync."""
    applied = applied_above(module)
    before = list(applied.sync or [True] * len(applied.plan.units))
    set_requires_gradient_sync(applied.model, False)
    try:
        yield
    finally:
        if all(before):
            set_requires_gradient_sync(applied.model, True)
        for value in (False, True):
            applied.set_sync([unit for unit, sync in enumerate(before) if sync == value], value)


def abandon_step(model: nn.Module) -> None:
    """Gives up the step under way, after an exception that the loop has caught, say: its gradients and the gathered
    parameters are dropped, parameters and optimizer state stay as they are, and the next forward begins a step.

    All ranks have to. RuntimeError after a collective has failed: the ranks cannot go on together then.
    """
    applied_to(model).runtime.abandon()
