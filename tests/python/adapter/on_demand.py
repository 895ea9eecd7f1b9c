# SPDX-License-Identifier: Apache-2.0
"""Training wholly on demand, under every setting of the policy: each step leaves its plan with its first point, and no
plan is made of it, so all gathers and reductions are the plan's procedures. Losses, gradients and parameters equal real
FSDP2's, bit for bit.

`PYTHONPATH=tools/python .venv/bin/python tests/python/adapter/on_demand.py [NAME ...]` runs all settings, or those
whose name has one of the words, and prints what differs.
"""

from __future__ import annotations

import os
import pathlib
import sys
import tempfile
import warnings
from unittest import mock

import torch.nn as nn
from equivalence import (
    Case,
    Fsdp2Calls,
    Trainer,
    compare_on_ranks,
    compare_training,
    make_mesh,
    make_model,
    modules_named,
    verdict,
    whole_parameters,
    with_fsdp2,
)
from equivalence_models import ROOT, inputs_of, register_forward_methods

# Steps that FSDP2 itself does not run after a forward that has no backward, or that have no plan's step to leave.
LEFT_OUT = ("unshard", "reshard")


def with_plan_left(case: Case, model: nn.Module, mesh, plan: str) -> nn.Module:
    import shardplan.torch as sp

    register_forward_methods(model, sp.register_forward_method)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sp.apply(model, plan, mesh, on_deviation="replan")


class Steered:
    """The setters that decide what a backward does are called; all others are in the plan."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, call: dict) -> None:
        import shardplan.torch as sp

        (module,) = modules_named(self.model, call.get("module", ""))
        if call["method"] == "set_requires_gradient_sync":
            sp.set_requires_gradient_sync(module, call["value"], recurse=call.get("recurse", True))


class LeavingTrainer(Trainer):
    """Every step begins with a forward that is dropped: the plan has none."""

    def step(self, number: int) -> dict:
        made = inputs_of(self.case.model, 77 + self.rank())
        self.model(*made[0], **made[1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return super().step(number)


def compare(case: Case, plan: str) -> tuple[float, str]:
    """On a rank."""
    import shardplan.torch._replay.kept_plans as adapter
    from shardplan.torch import PlanError

    mesh = make_mesh(case)
    with mock.patch.object(adapter, "replan", side_effect=PlanError("this test makes none")):
        ours_model = with_plan_left(case, make_model(case), mesh, plan)
        theirs_model = with_fsdp2(case, make_model(case), mesh)
        ours = LeavingTrainer(case, ours_model, Steered(ours_model))
        theirs = LeavingTrainer(case, theirs_model, Fsdp2Calls(theirs_model))
        return compare_training(case, ours, theirs, whole_parameters)


def runs(case: Case) -> bool:
    calls = [call for step in case.strategy.get("program") or [] for call in step]
    return not any(call.get("method") in LEFT_OUT for call in calls)


def main() -> None:
    sys.path[:0] = [str(ROOT / "tools" / "python"), str(ROOT / "tests" / "python")]
    import on_demand as this
    from equivalence_plans import make_plans
    from equivalence_settings import CASES

    build = pathlib.Path(os.environ.get("SHARDPLAN_BUILD", ROOT / "build" / "dev")).resolve()
    cases = [c for c in CASES if this.runs(c) and (not sys.argv[1:] or any(word in c.name for word in sys.argv[1:]))]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        here = pathlib.Path(folder)
        plans = make_plans(cases, here / "plans", build)
        for ranks in sorted({case.ranks for case in cases}):
            group = [case for case in cases if case.ranks == ranks]
            results = compare_on_ranks(group, here / f"ranks{ranks}", plans, this.compare)
            for case in group:
                found = verdict(case, results)
                wrong += bool(found)
                print(f"{case.name}: {found or 'equal'}", flush=True)
    print(f"{len(cases)} settings, {len(cases) - wrong} equal")
    print(f"cases {len(cases)}, failures {wrong}")


if __name__ == "__main__":
    main()
