"""What a loop says about a step that its plan may not have: micro-batches without communication, steps that are given up."""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Iterator

import torch.nn as nn

from . import _optimizers
from ._applied import ATTRIBUTE, UNIT_ATTRIBUTE, applied_to
from ._calls import finalize_backward
from ._errors import PlanError
from ._fit import modules_of
from ._flat_whole import gather
from ._summon import whole_copy

# By policy, what the root has as PyTorch gives it to it.
_METHODS = {
    "fsdp2": ("set_requires_gradient_sync", "set_is_last_backward", "finalize_backward"),
    "fsdp1": ("no_sync",),
}


def _applied_above(module: nn.Module):
    of_unit = getattr(module, UNIT_ATTRIBUTE, None)
    return of_unit[0] if of_unit is not None else applied_to(module)


def _units_of(applied, module: nn.Module, recurse: bool) -> list[int]:
    """The units that have the module, or one below it, among theirs."""
    modules = modules_of(applied.model)
    wanted = {id(m) for m in (module.modules() if recurse else [module])}
    return [i for i, unit in enumerate(applied.plan.units) if any(id(modules[fqn]) in wanted for fqn in unit.modules)]


def set_requires_gradient_sync(module: nn.Module, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    """Whether backwards from now on reduce gradients or keep them for a later one, as FSDPModule.set_requires_gradient_sync.

    A plan whose step does the same is followed. One that does not is left (on_deviation): "stop" raises in the backward,
    "replan" does what was asked for on demand, and plans such steps from then on.
    """
    applied = _applied_above(module)
    applied.set_sync(_units_of(applied, module, recurse), requires_gradient_sync)


def set_is_last_backward(module: nn.Module, is_last_backward: bool) -> None:
    """As FSDPModule.set_is_last_backward: whether a backward forgets which modules of a group its forward has run."""
    _applied_above(module).set("set_is_last_backward", value=is_last_backward)


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Inside, backwards keep their gradients, as with FullyShardedDataParallel.no_sync."""
    applied = _applied_above(module)
    before = list(applied.sync or [True] * len(applied.plan.units))
    set_requires_gradient_sync(applied.model, False)
    try:
        yield
    finally:
        for value in (False, True):
            applied.set_sync([unit for unit, sync in enumerate(before) if sync == value], value)


def abandon_step(model: nn.Module) -> None:
    """Gives up the step under way, after an exception that the loop has caught, say: its gradients and the gathered
    parameters are dropped, parameters and optimizer state stay as they are, and the next forward begins a step.

    All ranks have to. RuntimeError after a collective has failed: the ranks cannot go on together then.
    """
    applied_to(model).runtime.abandon()


def add_methods(model: nn.Module, policy: str) -> None:
    """The root has the methods that PyTorch gives it, so a loop written for FSDP2 (FSDP1) needs no change."""
    for name in _METHODS[policy]:
        if not hasattr(model, name):
            object.__setattr__(model, name, types.MethodType(globals()[name], model))


def _remove_methods(model: nn.Module) -> None:
    for name in itertools.chain.from_iterable(_METHODS.values()):
        vars(model).pop(name, None)


def _make_whole(applied) -> None:
    """Every module holds its own whole parameters again. Collective."""
    for unit, shards in zip(applied.plan.units, applied.shards):
        if unit.flat:
            shards.make_whole(gather(shards))
            continue
        for expected, sharded in zip(unit.parameters, shards):
            whole = whole_copy(sharded.shard)
            for slot in applied.by_fqn[expected.fqn].slots:
                slot.module.register_parameter(slot.name, whole)


def remove(model: nn.Module) -> nn.Module:
    """Takes the plan off the model: its parameters are whole again, plain tensors on the device, without gradients; hooks and
    methods are gone. A step under way is given up. Optimizers made for the shards no longer fit. Collective. Returns the model."""
    applied = applied_to(model)
    if not applied.runtime.between_steps:
        applied.runtime.abandon()
    if any(expected.gathered for unit in applied.plan.units for expected in unit.parameters):
        raise PlanError("a plan with all-gather extensions is not taken off a model")
    _make_whole(applied)
    applied.unhook()
    for handle in applied.guards:
        handle.remove()
    _optimizers.forget(applied)
    _remove_methods(model)
    for module in model.modules():
        vars(module).pop(UNIT_ATTRIBUTE, None)
    vars(model).pop(ATTRIBUTE)
    for undo in applied.undo:
        undo()
    return model
