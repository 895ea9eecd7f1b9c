# SPDX-License-Identifier: Apache-2.0
"""forecast(): the memory of a step with other inputs than those so far."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from ._applied import applied_to
from ._planning import asked_memory, make_plan


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Of one rank, in the plan's steps that repeat."""

    allocated_bytes: int  # at the peak
    reserved_bytes: int  # by the caching allocator, once it reserves no more
    fits: bool  # in what the device of the plan's cluster has for it
    at_peak: dict[str, int]  # bytes by category


def forecast(
    model: nn.Module, args: tuple = (), kwargs: dict[str, Any] | None = None, *, loss: Callable[[Any], torch.Tensor] | None = None
) -> Forecast:
    """What a step of the present plan needs with such arguments of the model's forward: of the longest sequence, say, before it comes.

    args, kwargs: as the forward takes them; tensors may be on any device, the meta device too. loss: of the model's output; None: the
    output's `loss`, else its sum. Nothing is computed: the model is traced with fake tensors. Not collective.
    Raises ValueError for a model that shardplan.torch.auto has not made; PlanError where it cannot be traced.
    """
    applied = applied_to(model)
    if applied.skeleton is None:
        raise ValueError("shardplan: forecast is for models of shardplan.torch.auto; for a plan of your own: shardplan memory, with a trace of these inputs")
    trace = applied.skeleton.trace(args, kwargs or {}, loss)
    plan = make_plan("plan", trace, json.loads(applied.plan.strategy_json), cluster=applied.plan.cluster_json)
    expected = asked_memory(plan)
    peak = expected["peak"]
    at_peak = {name: bytes_ for name, bytes_ in zip(expected["categories"], peak["by_category"]) if bytes_}
    return Forecast(peak["total_bytes"], expected["allocator"]["peak_reserved_bytes"], expected["fits"], at_peak)
