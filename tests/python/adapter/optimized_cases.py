# SPDX-License-Identifier: Apache-2.0
"""Plans of `shardplan optimize` for small models, trained next to FSDP2 as it is by default.

`python optimized_cases.py FOLDER` traces the models and optimises every job. A process of its own: the tracer must be
there before autograd's first backward.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import subprocess
import sys

from adapter_workers import warm
from equivalence import (
    Case, Fsdp2Calls, PlanCalls, Trainer, compare_training, make_mesh, make_model, whole_parameters, with_fsdp2,
    with_plan,
)
from equivalence_models import BLOCKS, ROOT
from equivalence_plans import cluster, trace

END = [{"call": "optimizer_step"}, {"call": "zero_grad"}]
STEPS = 4
HYBRID = (("replicate", 2), ("shard", 2))


@dataclasses.dataclass(frozen=True)
class Job:
    name: str
    model: str
    budget: str = "device"
    microbatches: int = 1
    mesh: tuple[tuple[str, int], ...] = (("shard", 2),)
    flags: tuple[str, ...] = ()
    checkpoint: dict | None = None  # what stays as it is given
    offload: dict | None = None  # of activations, as it is given
    levels: int = 0  # gradients are reduced over so many ranks in each micro-batch, and over the others in the last
    waits: str = ""  # ... of this module's unit only; the others' gradients are reduced in each
    parts: tuple[str, ...] = ()  # of blocks: units of their own
    # Gradients of micro-batches are summed before the ranks' sum and not behind it: other roundings.
    tolerance: float = 0.0

    def usual(self) -> dict:
        """FSDP2's own strategy of the job."""
        program = []
        for number in range(self.microbatches):
            program += [{"call": "forward", "microbatch": number}, {"call": "backward", "microbatches": [number]}]
        return {
            "units": [{"modules": [BLOCKS[self.model]]}, {"modules": [""]}],
            "mesh": [{"name": name, "size": size} for name, size in self.mesh],
            "program": [[*program, *END]],
        }

    def given(self) -> dict:
        """The given strategy has what binds the search, by the names of --fix."""
        strategy = self.usual()
        strategy["units"] = [*({"modules": [part]} for part in self.parts), *strategy["units"]]
        if self.checkpoint:
            strategy["checkpoint"] = self.checkpoint
        if self.offload:
            strategy["activation_offload"] = self.offload
        if self.levels:
            strategy["fsdp2"] = {"inner_reduce_ranks": self.levels}
            ((*passes, step, zero),) = strategy["program"]
            setter = {
                "call": "module", "method": "set_requires_all_reduce", "module": self.waits, "recurse": not self.waits,
            }
            first, last = ({**setter, "value": value} for value in (False, True))
            strategy["program"] = [[first, *passes[:-2], last, *passes[-2:], step, zero]]
        return strategy

    def fixed(self) -> list[str]:
        return [
            *(["checkpoint"] if self.checkpoint else []),
            *(["reduction", "accumulation"] if self.levels else []),
            *(["units"] if self.waits or self.parts else []),
        ]

    def case(self, strategy: dict) -> Case:
        ranks = 1
        for _, size in self.mesh:
            ranks *= size
        return Case(self.name, self.model, {}, strategy, ranks, steps=STEPS, tolerance=self.tolerance)


JOBS = [
    Job("mlp", "mlp"),
    Job("gpt", "gpt"),
    # The user wraps nothing: sp.apply does.
    Job("gpt_recomputes", "gpt", flags=("--allow", "checkpoint")),
    Job("gpt_recomputes_blocks", "gpt", checkpoint={"modules": ["blocks.*"]}),
    Job(
        "gpt_recomputes_blocks_in_parts",
        "gpt",
        checkpoint={"modules": ["blocks.*"]},
        parts=("blocks.*.attention.qkv", "blocks.*.up", "blocks.*.down"),
    ),
    Job(
        "gpt_keeps_products",
        "gpt",
        checkpoint={
            "modules": ["blocks.0", "blocks.1.attention", "blocks.2.attention"],
            "save": [{"name": "aten.addmm", "recompute_every": 2}],
        },
    ),
    Job("gpt_offloads_activations", "gpt", offload={"modules": ["blocks.0", "blocks.2"], "min_bytes": 0}),
    Job("mlp_accumulates", "mlp", microbatches=3, tolerance=1e-4),
    Job("mlp_accumulates_in_two_levels", "mlp", microbatches=3, mesh=(("shard", 4),), levels=2, tolerance=1e-4),
    Job(
        "mlp_accumulates_one_unit_in_two_levels", "mlp", microbatches=3, mesh=(("shard", 4),), levels=2,
        waits="layers.1", tolerance=1e-4,
    ),
    Job("gpt_replicas", "gpt", mesh=HYBRID),
    Job("gpt_replicas_recompute", "gpt", mesh=HYBRID, flags=("--allow", "checkpoint")),
    Job("mlp_replicas_accumulate", "mlp", microbatches=3, mesh=HYBRID, tolerance=1e-4),
    # Keys' biases have gradients of nothing but rounding, which AdamW makes steps of: sums keep their order.
    Job(
        "gpt_replicas_accumulate_and_recompute_blocks", "gpt", microbatches=2, mesh=HYBRID,
        flags=("--fix", "accumulation"), checkpoint={"modules": ["blocks.*"]},
    ),
]


def compare(case: Case, plan: str) -> tuple[float, str]:
    """On a rank: the optimised plan next to FSDP2 by default."""
    job = next(job for job in JOBS if job.name == case.name)
    usual = job.case(job.usual())
    mesh = make_mesh(case)
    ours_model = with_plan(case, make_model(case), mesh, plan)
    theirs_model = with_fsdp2(usual, make_model(usual), mesh)
    ours = Trainer(case, ours_model, PlanCalls(ours_model))
    theirs = Trainer(usual, theirs_model, Fsdp2Calls(theirs_model))
    runs = [0, 0]
    if job.checkpoint:
        for side, model in enumerate((ours_model, theirs_model)):
            model.blocks[1].attention.qkv.register_forward_pre_hook(functools.partial(_count, runs, side))
    # The two programs name their calls apart; what the optimizer made is compared.
    distance, difference = compare_training(case, Stepped(ours), Stepped(theirs), whole_parameters)
    if distance <= case.tolerance and runs[0] != (2 if job.checkpoint else 1) * runs[1]:
        return (
            math.inf,
            f"the plan's model ran a module {runs[0]} times, and the other {runs[1]} times: "
            "once more for each is right",
        )
    return distance, difference


def _count(runs: list[int], side: int, *_: object) -> None:
    runs[side] += 1


class Stepped:
    """A trainer of which only the losses and what the optimizer made count."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.model = trainer, trainer.model

    def step(self, number: int) -> dict:
        seen = self.trainer.step(number)
        losses = [value for name, value in seen.items() if name.endswith(": loss")]
        parameters = whole_parameters(self.model)
        return {**{f"loss {index}": loss for index, loss in enumerate(losses)}, **parameters}


def main(folder_name: str) -> None:
    from shardplan.tracer import document

    folder = pathlib.Path(folder_name)
    for job in JOBS:
        case = job.case(job.usual())
        trace_path, given, made = (folder / f"{job.name}.{what}.json" for what in ("trace", "given", "made"))
        with open(trace_path, "w", encoding="utf-8") as file:
            document.write(trace(case), file)
        given.write_text(json.dumps({"schema": "shardplan.strategy/1", "policy": "fsdp2", **job.given()}))
        flags = (*job.flags, *(("--fix", *job.fixed()) if job.fixed() else ()))
        command = [
            pathlib.Path(os.environ["SHARDPLAN_BUILD"], "bin", "shardplan"), "optimize", trace_path, "--cluster",
            cluster(folder, case.ranks), "--strategy", given, "--policy", "fsdp2", "--memory-budget", job.budget, "-o",
            folder / f"{job.name}.plan.json", "--write-strategy", made, "--time-limit", "2min", "-q", *flags,
        ]
        done = subprocess.run([str(part) for part in command], text=True, capture_output=True)
        if done.returncode != 0:
            raise RuntimeError(f"{job.name}: shardplan optimize: exit code {done.returncode}\n{done.stderr}")


def make(folder: pathlib.Path, build_folder: pathlib.Path) -> tuple[list[Case], dict[str, str]]:
    """The cases with what was decided for each, and the paths of their plans."""
    here = pathlib.Path(__file__).resolve()
    paths = [str(here.parent), str(ROOT / "tools" / "python"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "SHARDPLAN_BUILD": str(build_folder),
    }
    done = warm.run([here, folder], env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"making plans failed:\n{done.stdout}\n{done.stderr}")
    cases = []
    for job in JOBS:
        strategy = json.loads((folder / f"{job.name}.made.json").read_text())
        cases.append(job.case({key: value for key, value in strategy.items() if key not in ("schema", "policy")}))
    return cases, {job.name: str(folder / f"{job.name}.plan.json") for job in JOBS}


if __name__ == "__main__":
    main(*sys.argv[1:])
