# SPDX-License-Identifier: Apache-2.0
"""Memory that a plan expects: beside what the allocator has, where a device's memory is short, and of steps with other
inputs.

[Note: who runs out of memory] An instruction of the plan may be refused memory, or an operator of the model between two
of them. The caching allocator tells its observers in either case before it throws, so both are reported alike. Nothing
is computed before that happens: the plan's expectation is then asked of `shardplan memory`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from .._plans.planning import asked_memory, make_plan
from .applied import Applied, applied_to

_GIB = 1 << 30
_ASK_S = 60.0
_LARGEST = 6  # categories that are listed

_watched: weakref.WeakSet[Applied] = weakref.WeakSet()  # of all devices; the allocator's observers stay
_asked: weakref.WeakKeyDictionary[Applied, tuple] = weakref.WeakKeyDictionary()  # (plan, rows of `shardplan memory`)
_ROW_BEFORE = {
    "step_begin": "step_begin", "optimizer_step": "backward_returned", "zero_grad": "optimizer_step_end",
    "step_end": "zero_grad_end",
}


def watch(applied: Applied) -> None:
    """From now on a report goes to standard error whenever memory is short on the GPU of an applied model."""
    if applied.device.type != "cuda":
        return
    _attach()
    _watched.add(applied)


@functools.cache
def _attach() -> None:
    """Once in a process."""
    torch._C._cuda_attach_out_of_memory_observer(_report)


def _report(device: int, requested_bytes: int, used_bytes: int, free_bytes: int) -> None:
    here = [applied for applied in _watched if _index(applied.device) == device]
    for applied in [one for one in here if not one.runtime.between_steps] or here:
        print(_text(applied, device, requested_bytes, free_bytes), file=sys.stderr, flush=True)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _expected(applied: Applied) -> dict[str, Any] | str:
    """The output of `shardplan memory --rows` for the plan, or why there is none."""
    if applied not in _asked or _asked[applied][0] is not applied.plan:
        try:
            _asked[applied] = applied.plan, asked_memory(applied.plan.json, _ASK_S)
        except Exception as error:  # the observer is below an allocation: what went wrong there is what is raised
            return str(error)
    return _asked[applied][1]


def _row(applied: Applied, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The row of the point that the plan is at."""
    kind, unit, microbatch = applied.runtime.next_point
    event = _ROW_BEFORE.get(kind, f"{kind}.before")
    name = "" if unit < 0 else applied.plan.units[unit].fqn or "(root)"
    for row in rows:
        if row["event"] == event and (unit < 0 or row["unit"] == name) and row["microbatch"] == max(microbatch, 0):
            return row
    return None


def _gib(value: int) -> str:
    return f"{value / _GIB:9.3f} GiB"


def _text(applied: Applied, device: int, requested_bytes: int, free_bytes: int) -> str:
    rank = dist.get_rank() if dist.is_initialized() else 0
    lines = [
        f"shardplan: rank {rank} is out of memory, {applied.runtime.where}: {requested_bytes} bytes were asked for"
    ]
    stats = torch.cuda.memory_stats(device)
    allocated, peak = stats["allocated_bytes.all.current"], stats["allocated_bytes.all.peak"]
    reserved = stats["reserved_bytes.all.current"]
    expected = _expected(applied)
    if isinstance(expected, str):
        lines.append(f"  allocated {_gib(allocated)}, reserved {_gib(reserved)}, free on the device {_gib(free_bytes)}")
        return "\n".join([*lines, f"  what the plan expects is unknown: {expected}"])
    row = _row(applied, expected["rows"])
    lines.append("                               the plan   the allocator")
    if row is not None:
        lines.append(f"  allocated here       {_gib(row['total_bytes'])}   {_gib(allocated)}")
    lines.append(f"  peak of allocated    {_gib(expected['peak']['total_bytes'])}   {_gib(peak)}")
    lines.append(f"  reserved             {_gib(expected['allocator']['peak_reserved_bytes'])}   {_gib(reserved)}")
    lines.append(f"  free on the device                   {_gib(free_bytes)}")
    if row is not None:
        largest = sorted(zip(row["by_category"], expected["categories"]), reverse=True)[:_LARGEST]
        lines.append(
            "  planned here: " + ", ".join(f"{name} {_gib(bytes_).strip()}" for bytes_, name in largest if bytes_)
        )
    if not applied.plan.has_operators:
        lines.append(
            "  the plan was made without operators (of the module tree, or of a step that left its plan): the model's "
            "own tensors are not in it"
        )
    lines.append("  shardplan.torch.abandon_step(model) gives the step up, if every rank does")
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Memory of one rank, in the plan's steps that repeat."""

    allocated_bytes: int  # at the peak
    reserved_bytes: int  # by the caching allocator, once it reserves no more
    fits: bool  # in what the device of the plan's cluster has for it
    at_peak: dict[str, int]  # bytes by category


def forecast(
    model: nn.Module,
    args: tuple = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Forecast:
    """Memory of a step of the present plan with such arguments of the model's forward: the longest sequence, say,
    before it comes.

    args, kwargs: as the forward takes them; tensors may be on any device, the meta device too. loss: of the model's
    output; None: the output's `loss`, else its sum. Nothing is computed: the model is traced with fake tensors. Not
    collective. Raises ValueError for a model that shardplan.torch.auto has not made; PlanError where it cannot be
    traced.
    """
    applied = applied_to(model)
    if applied.skeleton is None:
        raise ValueError(
            "shardplan: forecast is for models of shardplan.torch.auto; for a plan of your own: shardplan memory, "
            "with a trace of these inputs"
        )
    trace = applied.skeleton.trace(args, kwargs or {}, loss)
    plan = make_plan("plan", trace, json.loads(applied.plan.strategy_json), cluster=applied.plan.cluster_json)
    expected = asked_memory(plan)
    peak = expected["peak"]
    at_peak = {name: bytes_ for name, bytes_ in zip(expected["categories"], peak["by_category"]) if bytes_}
    return Forecast(peak["total_bytes"], expected["allocator"]["peak_reserved_bytes"], expected["fits"], at_peak)
