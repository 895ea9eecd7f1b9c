# SPDX-License-Identifier: Apache-2.0
"""The trace and the strategy of a torchtitan job."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

from shardplan import files
from shardplan.titan.job import Job
from shardplan.tracer import document, muon_steps, session
from shardplan.tracer.progress import Progress
from shardplan.tracer.routing import BALANCED


def write(words: list[str], ranks: int, options: argparse.Namespace, folder: Path, progress: Progress) -> str:
    """Writes trace.json and strategy.json; gives a line about the job. Raises TracerError."""
    job = Job(words, ranks)
    settings = session.Options(
        batch=job.batch,
        seq=job.seq,
        dtype=job.config.training.mixed_precision_param,
        param_dtype=job.config.training.dtype,
        routing=options.routing if job.has_experts or options.routing != BALANCED else "",
        ignore_compile=True,
        name=job.name,
    )
    with job.running():
        trace, strategy = session.trace_and_strategy(job.build, f"torchtitan {job.name}", settings, progress)
    trained = [entry["fqn"] for entry in trace["parameters"] if entry.get("requires_grad", True)]
    strategy["optimizer"], of_muon = job.optimizer(trained)
    if of_muon is not None:
        muon_steps.add_optimizer_steps(trace, of_muon, progress)
    strategy["compile"] = job.compiles("model")
    strategy["alloc_conf"] = options.alloc_conf
    accumulated = job.micro_batches()
    if accumulated > 1:
        strategy["program"] = [_accumulated(strategy.get("program", [None])[0], trace, accumulated)]
    for note in job.notes():
        progress.note(note)
    with files.replacing(folder / "trace.json") as file:
        document.write(trace, file)
    files.write_text(folder / "strategy.json", json.dumps(strategy, indent=2) + "\n")
    mesh = " x ".join(f"{dim['name']} {dim['size']}" for dim in strategy["mesh"])
    batches = f", {accumulated} micro-batches" if accumulated > 1 else ""
    return f"torchtitan {job.name}, {ranks} ranks ({mesh}), {job.batch} x {job.seq:,} tokens{batches}"


def _accumulated(program: list[dict[str, Any]] | None, trace: dict, count: int) -> list[dict[str, Any]]:
    """The step's calls of a micro-batch as often as there are some."""
    if program is None:
        order = trace.get("calls") or [["forward", 0], ["backward", 0]]
        program = [{"call": kind, "trace": number} for kind, number in order]
        program += [{"call": "optimizer_step"}, {"call": "zero_grad"}]
    made: list[dict[str, Any]] = []
    for batch in range(count):
        for call in copy.deepcopy(program[:-2]):
            if call["call"] == "forward":
                call["microbatch"] = batch
            elif call["call"] == "backward":
                call["microbatches"] = [batch]
            made.append(call)
    return made + program[-2:]
