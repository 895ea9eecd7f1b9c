# SPDX-License-Identifier: Apache-2.0
"""The trace of a case: the plain model, by the project's tracer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch

from shardplan.tracer import record, session
from shardplan_conformance import checkpointing, processes
from shardplan_conformance.case import Case, traced_program
from shardplan_conformance.meshes import device_mesh, fake_process_group

_SEED = 0


def make_model(case: Case) -> torch.nn.Module:
    torch.manual_seed(_SEED)
    return case.model()


def compute_dtype(strategy: dict) -> str | None:
    """The dtype of the passes: the parameters' under the strategy's mixed precision, else the model's own."""
    return (strategy.get("mixed_precision") or {}).get("param_dtype")


def trace(make_case: Callable[[], Case]) -> dict:
    """In a process of its own where DTensors take part: what their threads remember of one mesh would meet the next
    one."""
    case = make_case()
    if case.parallelize is None:
        return trace_case(case)
    with ProcessPoolExecutor(1, processes.context()) as pool:
        return pool.submit(_trace_made, make_case).result()


def _trace_made(make_case: Callable[[], Case]) -> dict:
    return trace_case(make_case())


def trace_case(case: Case) -> dict:
    with checkpointing.early_stop(case.strategy):  # of checkpoints that the model calls itself
        return _trace_case(case)


def _trace_case(case: Case) -> dict:
    model = make_model(case)
    own = next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float32)
    wanted = compute_dtype(case.strategy)
    options = session.Options(
        dtype=wanted, param_dtype=str(own).removeprefix("torch.") if wanted else None, name=case.name
    )
    calls = [record.Call(**vars(forward)) for forward in case.forwards]
    groups = [
        record.Group([calls[i] for i in forwards], backward) for forwards, backward in traced_program(case).groups
    ]
    if case.parallelize is None:
        return session.trace_groups(model, groups, case.loss, options)
    with fake_process_group(case.ranks):
        mesh = device_mesh(case.strategy, case.ranks)
        return session.trace_groups(model, groups, case.loss, options, lambda module: case.parallelize(module, mesh))
