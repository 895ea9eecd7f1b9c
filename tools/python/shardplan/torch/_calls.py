# SPDX-License-Identifier: Apache-2.0
"""What a training loop may call on a module besides forward and backward."""

from __future__ import annotations

import torch.nn as nn

from ._applied import UNIT_ATTRIBUTE


def _unit_of(module: nn.Module):
    found = getattr(module, UNIT_ATTRIBUTE, None)
    if found is None:
        raise ValueError(f"shardplan: {type(module).__name__} is no module of a unit of an applied plan")
    return found


def unshard(module: nn.Module, async_op: bool = False) -> None:
    """Gathers the parameters of the module's unit now, as FSDPModule.unshard does.

    A plan that has this call (strategy, `program`: method "unshard") is followed; otherwise the unit is gathered at once
    and stays so until reshard() or the next step, which only works between steps. async_op is the plan's to decide: the
    wait is where the plan has it. All ranks have to call it.
    """
    applied, unit = _unit_of(module)
    applied.runtime.unshard(unit)


def reshard(module: nn.Module) -> None:
    """Frees the gathered parameters of the module's unit, as FSDPModule.reshard does."""
    applied, unit = _unit_of(module)
    applied.runtime.reshard(unit)


class GradientReduction:
    """What finalize_backward(async_op=True) returns."""

    def __init__(self, module: nn.Module) -> None:
        self._module: nn.Module | None = module

    def wait(self) -> None:
        """Before the optimizer: the compute stream waits for the reductions. A second call does nothing."""
        module, self._module = self._module, None
        if module is not None:
            applied, unit = _unit_of(module)
            applied.runtime.pass_call(unit, "wait_for_gradient_reduction")


def finalize_backward(module: nn.Module, *, async_op: bool = False) -> GradientReduction | None:
    """Ends the backwards since the last one, as FSDPModule.finalize_backward does after set_manual_backward_finalization.

    The plan has the call (strategy: `setup` with set_manual_backward_finalization, `program` with finalize_backward of the
    root; PyTorch 2.15), with the same async_op. PlanError where it does not.
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
    """hook(tensor) runs after the reduce_scatter (the all_reduce, where there are replicas) of the unit's gradients, on the
    stream of that collective; `tensor` is its output, in place. None: no hook."""
    applied, unit = _unit_of(module)
    applied.set("set_reduction_hook", unit, value=hook)
