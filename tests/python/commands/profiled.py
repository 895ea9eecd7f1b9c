# SPDX-License-Identifier: Apache-2.0
"""Two CPU ranks whose steps torch.profiler records, under real FSDP or a plan: `record(kind, plan, folder)` on a
rank."""

from __future__ import annotations

import pathlib
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "examples" / "train_gpt"))

from model import Gpt, GptConfig, loss_fn  # noqa: E402

CONFIG = GptConfig(vocabulary=256, context=32, layers=3, heads=4, width=64)
BATCH, SEQUENCE = 2, 32


def profiled_gpt() -> nn.Module:
    """For `shardplan trace profiled:profiled_gpt`."""
    return Gpt(CONFIG)


def _wrapped(kind: str, plan: str) -> nn.Module:
    torch.manual_seed(3)
    model = profiled_gpt()
    if kind == "plan":
        import shardplan.torch as sp

        return sp.apply(model, plan)
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}), device_id=torch.device("cpu")
        )
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def record(kind: str, plan: str, folder: str) -> None:
    """Writes rankN.json.gz: three steps after a warm one."""
    model = _wrapped(kind, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    profiler = torch.profiler
    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU],
        record_shapes=True,
        schedule=profiler.schedule(wait=0, warmup=1, active=3),
        on_trace_ready=lambda made: made.export_chrome_trace(f"{folder}/rank{dist.get_rank()}.json.gz"),
    ) as running:
        for number in range(4):
            tokens = torch.randint(
                CONFIG.vocabulary, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(number)
            )
            loss_fn(model(tokens[:, :-1]), tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
            running.step()
