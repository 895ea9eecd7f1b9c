# SPDX-License-Identifier: Apache-2.0
"""Functions that run on the ranks in test_adapter_agreement.py: each returns apply's message."""

from __future__ import annotations

import time
import warnings

import torch
import torch.distributed as dist
from adapter_cases import CASES, make_model
from adapter_workers import DEVICE


def _apply(model, plan: str, **options) -> str:
    import shardplan.torch as sp

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sp.apply(model.to(DEVICE), plan, **options)
    except sp.PlanError as error:
        return str(error)
    return "applied" + "".join(f"; warned: {w.message}" for w in caught)


def apply_plan(plan: str, options: dict | None = None) -> str:
    return _apply(make_model(CASES["default"]), plan, **(options or {}))


def apply_plans(plans: list[str]) -> list[str]:
    """One after the other, each to a fresh model."""
    return [apply_plan(plan) for plan in plans]


def apply_own_plan(plans: list[str]) -> str:
    """A plan for each rank."""
    return apply_plan(plans[dist.get_rank()])


def with_another_buffer(plan: str) -> str:
    """Rank 1's model has what no plan says anything of."""
    model = make_model(CASES["default"])
    if dist.get_rank() == 1:
        model.register_buffer("other", torch.zeros(3))
    return _apply(model, plan)


def with_another_version(plan: str) -> str:
    """Rank 1 runs another shardplan."""
    from shardplan.torch._job.native import native

    if dist.get_rank() == 1:
        native.__version__ = "0.0.1"
    return apply_plan(plan)


def rank_1_does_not_come(plan: str) -> tuple[str, float]:
    start = time.monotonic()
    said = apply_plan(plan) if dist.get_rank() == 0 else "stayed away"
    return said, time.monotonic() - start
