"""The trace of a case: the plain model, by the project's tracer."""

from __future__ import annotations

import torch

from shardplan.conformance.case import Case, traced_program
from shardplan.tracer import record, session

_SEED = 0


def make_model(case: Case) -> torch.nn.Module:
    torch.manual_seed(_SEED)
    return case.model()


def compute_dtype(strategy: dict) -> str | None:
    """What the passes run in: the parameters' dtype under the strategy's mixed precision, else the model's own."""
    return (strategy.get("mixed_precision") or {}).get("param_dtype")


def trace_case(case: Case) -> dict:
    model = make_model(case)
    own = next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float32)
    wanted = compute_dtype(case.strategy)
    options = session.Options(dtype=wanted, param_dtype=str(own).removeprefix("torch.") if wanted else None, name=case.name)
    calls = [record.Call(forward.args, forward.kwargs, forward.grad) for forward in case.forwards]
    groups = [record.Group([calls[i] for i in forwards], backward) for forwards, backward in traced_program(case).groups]
    return session.trace_groups(model, groups, case.loss, options)
