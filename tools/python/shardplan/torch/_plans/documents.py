# SPDX-License-Identifier: Apache-2.0
"""Plan documents: read, checked before a model follows them, and what tells their units apart."""

from __future__ import annotations

import os
import warnings

import torch

from shardplan.files import scratch_folder, write_text

from .._job.arguments import PlanError
from .._job.native import native

RequiresGrad = tuple[tuple[bool, ...], ...]  # by unit and parameter


def load_plan(path: str | os.PathLike) -> native.Plan:
    """Reads and validates a plan document. Raises PlanError with the file, the place in it, found and expected."""
    try:
        return native.read_plan(os.fspath(path))
    except ValueError as error:
        raise PlanError(str(error)) from None


def plan_of(text: str):
    """Reads a plan document. PlanError, with the place in it, found and expected."""
    with scratch_folder() as here:
        write_text(here / "plan.json", text)
        try:
            return native.read_plan(str(here / "plan.json"))
        except ValueError as error:
            raise PlanError(str(error)) from None


def check_for_use(plan, verify: bool) -> None:
    """Raises PlanError, in the verifier's words, for a plan that is not to be followed."""
    if not verify:
        warnings.warn("shardplan: the plan is not verified (verify=False)", stacklevel=4)
        return
    try:
        faults = native.check_plan_for_use(plan)
    except ValueError as error:
        raise PlanError(str(error)) from None
    for fault in faults:
        warnings.warn(f"shardplan: the plan has a fault because PyTorch has it: {fault}", stacklevel=4)


def check_release(plan) -> None:
    """A plan of another release than the installed one is followed all the same: the hooks fire as the plan's release
    has it."""
    installed = ".".join(torch.__version__.split(".")[:2])
    if plan.pytorch in (None, installed):
        return
    warnings.warn(
        f"shardplan: the plan follows FSDP of PyTorch {plan.pytorch}, and PyTorch {installed} is installed: schedule, "
        "memory and "
        f"numbers will be those of {plan.pytorch} (a strategy's `pytorch` names the release)",
        stacklevel=4,
    )


def names_of(expected) -> frozenset[str]:
    """All names of a plan's parameter."""
    return frozenset((expected.fqn, *expected.shared_with))


def requires_grad_of(plan) -> RequiresGrad:
    """Which parameters of the plan do."""
    return tuple(tuple(parameter.requires_grad for parameter in unit.parameters) for unit in plan.units)


def units_of(plan) -> list[tuple]:
    """The modules and parameters of each unit, by their FQNs."""
    return [(unit.modules, [parameter.fqn for parameter in unit.parameters]) for unit in plan.units]
