# SPDX-License-Identifier: Apache-2.0
"""The ranges that torch.profiler records of a step, by a plan and by real FSDP2: what runs on the ranks."""

from __future__ import annotations

import re

from equivalence import Case, Fsdp2Calls, PlanCalls, Trainer, make_mesh, make_model, with_fsdp2, with_plan
from equivalence_settings import BF16, GROUP, HSDP, accumulation, case

PREFIXES = ("FSDP::", "shardplan::")
KEEPS = [
    {"modules": ["layers.0"], "reshard_after_forward": False},
    {"modules": ["layers.1", "layers.2"]},
    {"modules": [""]},
]
CASTS = [
    {"modules": ["layers.*"], "mixed_precision": BF16},
    {"modules": [""], "mixed_precision": BF16 | {"output_dtype": "float32"}},
]

CASES = [
    case("default"),
    case("casts", units=CASTS),
    case("prefetches", fsdp2={"forward_prefetch": 1, "backward_prefetch": 2}),
    case("keeps", units=KEEPS),
    case("group", units=GROUP),
    case("accumulates", program=accumulation()),
    case("hsdp", ranks=2, mesh=[{**HSDP[0], "size": 1}, HSDP[1]]),
]


INSTRUCTIONS = re.compile(r"shardplan::(?!user_call|on_demand|lazy_init)")  # ranges of single ones


def ranges_of_a_step(trainer: Trainer, step: int) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        trainer.step(step)
    return [event.name for event in profiler.events() if event.name.startswith(PREFIXES)]


def ranges_of_all(cases: list[Case], plans: dict[str, str]) -> dict[str, tuple[set[str], set[str], list[str]]]:
    """Ranges by case: those of the plan, FSDP2's, and those of the plan's instructions. They are of the second step:
    the first one makes streams and states."""
    found = {}
    for of in cases:
        mesh = make_mesh(of)
        ours, theirs = with_plan(of, make_model(of), mesh, plans[of.name]), with_fsdp2(of, make_model(of), mesh)
        trainers = [Trainer(of, ours, PlanCalls(ours)), Trainer(of, theirs, Fsdp2Calls(theirs))]
        for trainer in trainers:
            trainer.step(0)
        plan, fsdp2 = (ranges_of_a_step(trainer, 1) for trainer in trainers)
        single = [name for name in plan if INSTRUCTIONS.match(name)]
        found[of.name] = set(plan) - set(single), set(fsdp2), single
    return found


def ranges_on_demand(of: Case, plan: str) -> tuple[set[str], set[str]]:
    """Ranges of an evaluation that the plan does not have."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    trainer = Trainer(of, (model := with_plan(of, make_model(of), make_mesh(of), plan)), PlanCalls(model))
    trainer.step(0)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.no_grad():
        trainer.forward(1, "", {}, {})
    names = [event.name for event in profiler.events() if event.name.startswith(PREFIXES)]
    return {name for name in names if name.startswith("FSDP::")}, {
        name for name in names if name.startswith("shardplan::")
    }


def nesting_of_a_step(of: Case, plan: str) -> list[tuple[str, str]]:
    """(range, the one around it) of the second step, each once."""
    from torch.profiler import ProfilerActivity, profile

    trainer = Trainer(of, (model := with_plan(of, make_model(of), make_mesh(of), plan)), PlanCalls(model))
    trainer.step(0)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        trainer.step(1)
    found = set()
    for event in profiler.events():
        parent = event.cpu_parent
        while parent is not None and not parent.name.startswith(PREFIXES):
            parent = parent.cpu_parent
        if event.name.startswith(PREFIXES):
            found.add((event.name, parent.name if parent else ""))
    return sorted(found)
