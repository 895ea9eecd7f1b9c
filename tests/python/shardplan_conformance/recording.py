# SPDX-License-Identifier: Apache-2.0
"""Files of a recorded case: NAME.trace.json, NAME.strategy.json and NAME.log, which `shardplan-conformance`
compares."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from shardplan import files
from shardplan.tracer import document
from shardplan_conformance.case import Case, planner_strategy
from shardplan_conformance.record_case import forward_order
from shardplan_conformance.trace_case import trace

Record = Callable[[list[str]], list[str]]  # of the order of the first forward: the log's lines


def write(make_case: Callable[[], Case], record: Record, folder: Path) -> int:
    """Traces and records the case; the number of recorded events."""
    case, traced = make_case(), trace(make_case)
    with files.replacing(folder / f"{case.name}.trace.json") as file:
        document.write(traced, file)
    strategy = planner_strategy(case)
    text = json.dumps(strategy, indent=1) + "\n"
    files.write_text(folder / f"{case.name}.strategy.json", text)
    lines = record(forward_order(traced, strategy))
    head = [f"# case {case.name}", f"# torch {torch.__version__}", f"# ranks {case.ranks}"]
    files.write_text(folder / f"{case.name}.log", "\n".join([*head, *lines]) + "\n")
    return len(lines)
