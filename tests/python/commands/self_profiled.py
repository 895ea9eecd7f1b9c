# SPDX-License-Identifier: Apache-2.0
"""Two CPU ranks that train by a plan and measure themselves: what runs on a rank."""

from __future__ import annotations

import json
import warnings

import shardplan.torch as sp
import torch
import torch.distributed as dist
import torch.nn as nn
from profiled import BATCH, CONFIG, SEQUENCE, loss_fn, profiled_gpt


class Training:
    def __init__(self, plan: str, **options) -> None:
        torch.manual_seed(3)
        self.model = sp.apply(profiled_gpt(), plan, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.steps = 0

    def forward(self) -> torch.Tensor:
        tokens = torch.randint(
            CONFIG.vocabulary, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(self.steps)
        )
        return loss_fn(self.model(tokens[:, :-1]), tokens[:, 1:])

    def step(self) -> float:
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return loss.item()


def profiled_steps(plan: str, folder: str) -> dict:
    """Writes rankN.json and both.json. The number of steps that it took, and whether losses are those of the same
    training without a profile."""
    training, plain = Training(plan), Training(plan)
    with sp.profile(training.model, steps=3, warmup=1) as profile:
        losses = []
        while not profile.done:
            losses.append(training.step())
    profile.save(f"{folder}/rank{dist.get_rank()}.json")
    profile.save(f"{folder}/both.json", all_ranks=True)
    return {
        "steps": training.steps,
        "equal": losses == [plain.step() for _ in losses],
        "same": profile.report() == profile.report(),
    }


def raised(function, *arguments, **options) -> str:
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def misuse(plan: str) -> dict[str, str]:
    """Messages by what was done."""
    training = Training(plan)
    said = {}
    for name, options in (
        ("steps", {"steps": 0}),
        ("warmup", {"warmup": -1}),
        ("float", {"steps": 2.0}),
        ("bool", {"steps": True}),
    ):
        said[name] = raised(sp.profile, training.model, **options)
    said["no plan"] = raised(sp.profile, nn.Linear(2, 2))
    with sp.profile(training.model, quiet=True) as profile:
        said["nested"] = raised(sp.profile(training.model).__enter__)
        said["early report"] = raised(profile.report)
        training.step()
    said["entered again"] = raised(profile.__enter__)
    said["too short"] = raised(profile.report)
    return said


def off(plan: str) -> dict:
    """Nothing is recorded before, between and after."""
    training = Training(plan)
    runtime = training.model._shardplan_applied.runtime
    training.step()
    found = {"before": (runtime.recorded_steps, runtime.stop_recording())}
    with sp.profile(training.model, steps=1, warmup=0, quiet=True) as first:
        while not first.done:
            training.step()
    for _ in range(3):
        training.step()
    found["after"] = (runtime.recorded_steps, runtime.stop_recording())
    with sp.profile(training.model, steps=2, warmup=2, quiet=True) as second:
        while not second.done:
            training.step()
    found["steps"] = [len(profile.report()["measured"]["steps_ns"]) for profile in (first, second)]
    return found


def given_up(plan: str) -> dict:
    """Recorded steps that are abandoned, that an exception ends, and that leave the plan are not in the report."""
    training = Training(plan, on_deviation="replan")
    training.step()
    with warnings.catch_warnings(), sp.profile(training.model, steps=2, warmup=0, quiet=True) as profile:
        warnings.simplefilter("ignore")
        training.forward()
        sp.abandon_step(training.model)
        training.forward()  # nobody goes backward: the next forward leaves the plan
        while not profile.done:
            training.step()
    report = profile.report()
    return {
        "steps": len(report["measured"]["steps_ns"]), "notes": report["notes"],
        "instructions": len(report["instructions"]),
    }


def failing(plan: str) -> str:
    """An exception in the loop is what the loop raises."""
    training = Training(plan)

    def loop() -> None:
        with sp.profile(training.model, quiet=True):
            training.step()
            training.forward()
            raise KeyError("the loop's own")

    said = raised(loop)
    sp.abandon_step(training.model)
    training.step()
    return said


def following_another_plan(plan: str) -> dict:
    """Steps that freeze a parameter follow a plan of their own, of which the report is when it has more steps."""
    training = Training(plan, on_deviation="replan")
    with warnings.catch_warnings(), sp.profile(training.model, steps=2, warmup=1, quiet=True) as profile:
        warnings.simplefilter("ignore")
        training.step()
        training.step()
        training.model.blocks[0].requires_grad_(False)
        while not profile.done:
            training.step()
    report = profile.report()
    reduced = {one["unit"] for one in report["instructions"] if one["kind"] == "reduce_scatter"}
    return {
        "steps": len(report["measured"]["steps_ns"]), "reduced": sorted(reduced),
        "text": json.dumps(report["plan_digest"]),
    }
