# SPDX-License-Identifier: Apache-2.0
"""Calls of a training loop besides forward and backward: what it does with a unit's parameters and gradients, and what
it says about a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.nn as nn

from .._replay.applied import UNIT_ATTRIBUTE, applied_above, applied_to
from .setters import units_of


def _unit_of(module: nn.Module):
    found = getattr(module, UNIT_ATTRIBUTE, None)
    if found is None:
        raise ValueError(f"shardplan: {type(module).__name__} is no module of a unit of an applied plan")
    return found


def unshard(module: nn.Module, async_op: bool = False) -> None:
    """Gathers the parameters of the module's unit now, as FSDPModule.unshard does.

    A plan that has this call (strategy, `program`: method "unshard") is followed; otherwise the unit is gathered at
    once and stays so until reshard() or the next step. That only works between steps, and in one that has left its
    plan. async_op is the plan's to decide: the wait is where the plan has it. All ranks have to call it.
    """
    applied, unit = _unit_of(module)
    applied.runtime.unshard(unit)


def reshard(module: nn.Module) -> None:
    """Frees the gathered parameters of the module's unit, as FSDPModule.reshard does."""
    applied, unit = _unit_of(module)
    applied.runtime.reshard(unit)


class GradientReduction:
    """The handle that finalize_backward(async_op=True) returns."""

    def __init__(self, module: nn.Module) -> None:
        self._module: nn.Module | None = module

    def wait(self) -> None:
        """Before the optimizer: the compute stream waits for the reductions. A second call does nothing."""
        module, self._module = self._module, None
        if module is not None:
            applied, unit = _unit_of(module)
            applied.runtime.pass_call(unit, "wait_for_gradient_reduction")


def finalize_backward(module: nn.Module, *, async_op: bool = False) -> GradientReduction | None:
    """Ends the backwards since the last one, as FSDPModule.finalize_backward does after
    set_manual_backward_finalization.

    The plan has the call (strategy: `setup` with set_manual_backward_finalization, `program` with finalize_backward of
    the root; PyTorch 2.15), with the same async_op. PlanError where it does not.
    """
    applied, unit = _unit_of(module)
    applied.runtime.pass_call(unit, "finalize_backward")
    return GradientReduction(module) if async_op else None


def set_custom_all_gather(module: nn.Module, comm) -> None:
    """The unit's all_gathers become comm(output_tensor=, input_tensor=, group=, async_op=False), as FSDP2 calls its
    AllGather; memory is the plan's, comm.allocate is not called. None: the backend's again."""
    applied, unit = _unit_of(module)
    applied.set("set_custom_collective", unit, True, value=comm)


def set_custom_reduce_scatter(module: nn.Module, comm) -> None:
    """The same for reduce_scatters, which are given op= as well."""
    applied, unit = _unit_of(module)
    applied.set("set_custom_collective", unit, False, value=comm)


def set_all_reduce_hook(module: nn.Module, hook) -> None:
    """hook(tensor) runs after the reduce_scatter (the all_reduce, where there are replicas) of the unit's gradients, on
    the stream of that collective; `tensor` is its output, in place. None: no hook."""
    applied, unit = _unit_of(module)
    applied.set("set_reduction_hook", unit, value=hook)


def set_requires_gradient_sync(module: nn.Module, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    """Whether backwards from now on reduce gradients or keep them for a later one, as
    FSDPModule.set_requires_gradient_sync.

    A plan whose step does the same is followed. One that does not is left (on_deviation): "stop" raises in the
    backward, "replan" does what was asked for on demand, and plans such steps from then on.
    """
    applied = applied_above(module)
    if applied.setters is not None:
        applied.setters.set_requires_gradient_sync(module, requires_gradient_sync, recurse)
    else:
        applied.set_sync(units_of(applied, module, recurse), requires_gradient_sync)


def set_is_last_backward(module: nn.Module, is_last_backward: bool) -> None:
    """Whether a backward forgets which modules of a group its forward has run, as FSDPModule.set_is_last_backward."""
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
    """Gives up the step under way, after an exception that the loop has caught, say. Its gradients and the gathered
    parameters are dropped. Parameters and optimizer state stay as they are, and the next forward begins a step.

    All ranks have to. RuntimeError after a collective has failed: the ranks cannot go on together then.
    """
    applied_to(model).runtime.abandon()
