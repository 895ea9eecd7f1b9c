# SPDX-License-Identifier: Apache-2.0
"""The class of the modules of an applied plan's units: FSDPModule's methods, answered by the plan.

[Note: FSDPModule] A unit's module is an instance of FSDPModule, as fully_shard makes it, with every method of it that a
user calls. FSDP2's own inside, the FSDPState, is not there: the object that `_get_fsdp_state` returns says so for each
attribute, but for the two calls that register_fsdp_forward_method makes. Classes keep their names, since the rules of a
strategy name them, and the user's class is the third of the order in which methods are looked up: libraries find it
there.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from .._model.fit import modules_of, refuse_to_copy
from .._replay.applied import Applied, applied_above
from . import calls


class _PlannedUnshard(UnshardHandle):
    """The handle of unshard(async_op=True): the wait is where the plan has it."""

    def wait(self) -> None:
        return


class _Reduction(getattr(torch.distributed.fsdp, "GradientReductionHandle", object)):  # of 2.15
    """The handle of finalize_backward(async_op=True)."""

    def __init__(self, module: nn.Module, planned: bool) -> None:
        self._module, self._planned = module, planned

    def wait(self) -> None:
        module, self._module = self._module, None
        if module is None:
            return
        module._set("wait_for_gradient_reduction")
        if self._planned:
            calls.GradientReduction(module).wait()


class _State:
    """In place of an FSDPState. A method that torch's register_fsdp_forward_method was told of gathers the unit for as
    long as it runs, between steps; inside a step shardplan.torch.register_forward_method does it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def _pre_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"shardplan: a method of {type(module).__name__} that trains is registered with "
                "shardplan.torch.register_forward_method, before the "
                "plan is applied, and not with torch's register_fsdp_forward_method"
            )
        calls.unshard(module)
        return args, kwargs

    def _post_forward(self, module: nn.Module, _args: tuple, output: Any) -> Any:
        calls.reshard(module)
        return output

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"shardplan: a {type(self._module).__name__} that is trained by a plan has no FSDPState ({name}); the "
            "methods of FSDPModule are "
            "there, and docs/guide/migration.md says what to write in place of the others"
        )


class _Methods(nn.Module):
    """The methods of a unit's module."""

    def _set(self, method: str, **fields: Any) -> None:
        applied = applied_above(self)
        applied.setters.call(method, applied.fqn_of(self), **fields)

    # ---- gathering ----
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        applied = applied_above(self)
        planned = applied.setters.has("unshard")
        self._set("unshard", value=async_op)
        if planned or applied.runtime.between_steps:
            calls.unshard(self, async_op)
        return _PlannedUnshard() if async_op else None

    def reshard(self) -> None:
        applied = applied_above(self)
        planned, between = applied.setters.has("reshard"), applied.runtime.between_steps
        if not between:
            self._set("reshard")
        if planned or between:
            calls.reshard(self)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        self._set("set_keep_unsharded_storage", value=keep, recurse=recurse)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        self._set("set_unshard_in_backward", value=unshard_in_backward)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        self._set("set_reshard_after_forward", value=reshard_after_forward, recurse=recurse)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        self._set("set_reshard_after_backward", value=reshard_after_backward, recurse=recurse)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        self._set("set_modules_to_forward_prefetch", modules=self._units(modules))

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        self._set("set_modules_to_backward_prefetch", modules=self._units(modules))

    def _units(self, modules: list[FSDPModule]) -> list[str]:
        applied = applied_above(self)
        for module in modules:
            if not is_planned(module):
                raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
        return [applied.fqn_of(module) for module in modules]

    def _set_unshard_async_op(self, async_op: bool) -> None:
        self._set("_set_unshard_async_op", value=async_op)

    # ---- reducing ----
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        calls.set_requires_gradient_sync(self, requires_gradient_sync, recurse=recurse)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        calls.set_is_last_backward(self, is_last_backward)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        applied_above(self).setters.set_requires_all_reduce(self, requires_all_reduce, recurse)

    def set_gradient_divide_factor(self, factor: float) -> None:
        self._set("set_gradient_divide_factor", number=factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        self._set("set_force_sum_reduction_for_comms", value=enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        self._set("set_reduce_scatter_unused_params", value=reduce_scatter_unused_params, recurse=recurse)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        self._set("set_reduce_scatter_max_input_buffers", number=max_input_buffers, recurse=recurse)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        self._set("set_separate_reduce_scatter_group", value=enable, recurse=recurse)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        self._set("set_allocate_memory_from_process_group_for_comm", value=enable)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        raise NotImplementedError(
            'shardplan: a plan has no symmetric memory; shardplan.torch.apply(memory="arena") registers its memory '
            'with NCCL'
        )

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        self._set("set_manual_backward_finalization", value=enabled)

    def finalize_backward(self, *, async_op: bool = False) -> calls.GradientReduction | None:
        applied = applied_above(self)
        planned = applied.setters.has("finalize_backward")
        self._set("finalize_backward", **({"value": True} if async_op else {}))
        if not planned:  # by a strategy of the user's, or not at all
            return calls.finalize_backward(self, async_op=async_op)
        waits = applied.setters.has("wait_for_gradient_reduction")
        calls.finalize_backward(self, async_op=False)
        return _Reduction(self, waits) if async_op else None

    # ---- hooks and collectives ----
    def set_custom_all_gather(self, comm: Callable) -> None:
        calls.set_custom_all_gather(self, comm)

    def set_custom_reduce_scatter(self, comm: Callable) -> None:
        calls.set_custom_reduce_scatter(self, comm)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        calls.set_all_reduce_hook(self, hook)

    def set_post_optim_event(self, event: Any) -> None:
        self._set("set_post_optim_event", value=True)

    # ---- the step ----
    def reset_iter_state(self) -> None:
        calls.abandon_step(applied_above(self).model)

    def _get_fsdp_state(self) -> _State:
        return _State(self)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        return super(FSDPModule, self)._apply(fn, recurse=recurse)  # type: ignore[misc]


_OWN = {name: method for name, method in vars(_Methods).items() if not name.startswith("__")}


def is_planned(module: nn.Module) -> bool:
    """Is it of a unit, or the root, of a plan of fsdp2 that is applied?"""
    return type(module).__dict__.get("unshard") is _OWN["unshard"]


@functools.cache
def _class_of(own: type[nn.Module]) -> type[nn.Module]:
    """One for each class, as guards on types want it."""
    fields = {
        "__deepcopy__": refuse_to_copy, "__module__": own.__module__, "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
    }
    return type(own.__name__, (FSDPModule, own), {**_OWN, **fields})


def _planned_modules(applied: Applied) -> list[nn.Module]:
    modules = modules_of(applied.model)
    found = {id(modules[fqn]): modules[fqn] for unit in applied.plan.units for fqn in unit.modules}
    return list({id(applied.model): applied.model, **found}.values())


def give_methods(applied: Applied) -> None:
    """Modules of the units and the root are FSDPModules from now on; the root of a plan of fsdp1 has FSDP1's
    methods."""
    if applied.plan.policy == "fsdp1":
        if not hasattr(applied.model, "no_sync"):
            object.__setattr__(applied.model, "no_sync", types.MethodType(calls.no_sync, applied.model))
        return
    for module in _planned_modules(applied):
        if not isinstance(module, FSDPModule):
            module.__class__ = _class_of(type(module))


def take_methods(model: nn.Module) -> None:
    """The reverse."""
    vars(model).pop("no_sync", None)
    for module in model.modules():
        if is_planned(module):
            module.__class__ = type(module).__mro__[FSDPModule._orig_cls_mro_index]
