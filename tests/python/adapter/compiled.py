# SPDX-License-Identifier: Apache-2.0
"""Functions that run on the ranks in test_compiled.py: torch.compile under a plan and under FSDP2."""

from __future__ import annotations

import os
import pathlib
import unittest.mock
import warnings

import torch
import torch.nn as nn
from auto_features import loss_of
from equivalence_models import Mlp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import shardplan.torch as sp

# How torchtitan and others compile, in the order checkpointing, compilation, sharding.
ALL = (
    "wrapper", "method", "wrapper checkpointed", "method checkpointed", "whole", "whole checkpointed",
    "wrapper dynamic",
)
# The rest runs in tools/nightly.
WAYS = ALL if os.environ.get("SHARDPLAN_ALL_SETTINGS") else ("wrapper checkpointed", "method", "whole")


def compiled(way: str, shard, backend: str, layers: int = 4, **search) -> nn.Module:
    torch.manual_seed(2)
    model = Mlp(layers=layers)
    options = {"backend": backend, "dynamic": True if "dynamic" in way else None}
    for number, layer in enumerate(model.layers):
        if "checkpointed" in way:
            layer = model.layers[number] = checkpoint_wrapper(layer)
        if "wrapper" in way:
            layer = model.layers[number] = torch.compile(layer, fullgraph=True, **options)
        if "method" in way:
            layer.compile(fullgraph=True, **options)
        shard(layer)
    shard(model)
    if shard is sp.unit:
        sp.auto(model, quiet=True, **search)
    return torch.compile(model, **options) if "whole" in way else model


def train(way: str, by_plan: bool, backend: str, steps: int = 5, **search) -> dict:
    """Losses, and what the compiler did: in the last step the sequence is longer. search: arguments of sp.auto."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    graphs = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = compiled(way, sp.unit if by_plan else fully_shard, backend, **search)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        losses = []
        for step in range(steps):
            length = 5 if step < steps - 1 else 9
            loss = loss_of(model(torch.randn(2, length, 7, generator=torch.Generator().manual_seed(step))))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            graphs.append(counters["stats"]["unique_graphs"])
    breaks = sorted(reason.splitlines()[0] for reason in counters["graph_break"])
    return {
        "losses": losses,
        "graphs": graphs,
        "breaks": breaks,
        "warnings": sorted({str(w.message).splitlines()[0] for w in said}),
    }


def both(way: str, backend: str) -> tuple[dict, dict]:
    return train(way, True, backend), train(way, False, backend)


def nested() -> str:
    """A unit inside of a graph that is to be whole: what it says."""
    torch._dynamo.reset()
    model = Mlp(layers=2)
    for number, layer in enumerate(model.layers):
        sp.unit(layer.up)
        sp.unit(layer)
        model.layers[number] = torch.compile(layer, backend="aot_eager", fullgraph=True)
    sp.auto(model, quiet=True)
    try:
        model(torch.randn(2, 5, 7))
    except Exception as error:
        return str(error)
    return "runs"


def searched(folder: str) -> tuple[dict, list[str]]:
    """Training by a plan that is searched for in a trace of the compiled blocks: what `train` says, and what the trace
    says of them."""
    torch._dynamo.reset()
    seen = []
    from shardplan.tracer import session

    trace_module = session.trace_module

    def noting(*arguments):
        seen.append(trace_module(*arguments))
        return seen[-1]

    cluster = pathlib.Path(__file__).resolve().parents[3] / "examples" / "train_gpt" / "cluster.json"
    search = {
        "policy": "optimize", "budget": "40MB", "cluster": cluster, "search_seconds": 2, "plans": folder,
        "loss": loss_of, "allow": (),
    }
    with unittest.mock.patch.object(session, "trace_module", noting):
        result = train("method", True, "aot_eager", **search)
    compiled = [m["compiled"] for trace in seen for m in trace["modules"] if m.get("compiled")]
    return result, compiled


def run(folder: str) -> dict:
    results: dict = {f"{way}, aot_eager": both(way, "aot_eager") for way in WAYS}
    results["wrapper, inductor"] = both("wrapper", "inductor")
    results["nested"] = nested()
    results["searched"] = (*searched(folder), train("method", False, "aot_eager"))
    return results


NAMES = [*(f"{way}, aot_eager" for way in WAYS), "wrapper, inductor"]
