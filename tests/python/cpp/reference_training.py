# SPDX-License-Identifier: Apache-2.0
"""One rank of the training of tests/executor/training_worker.cc, in Python: the same settings, the same lines.

by=plan: follows the plan by shardplan.torch. by=fsdp2: PyTorch's own fully_shard, with a unit a block.
"""

from __future__ import annotations

import os
import struct
import sys

import gpt
import torch
import torch.distributed as dist
import torch.nn as nn
from twin import LibTorchAdam

import shardplan.torch as sp


def bits(value: torch.Tensor) -> str:
    return f"{struct.unpack('<I', struct.pack('<f', value.detach().item()))[0]:08x}"


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if kind in ("sgd", "momentum"):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9 if kind == "momentum" else 0)
    if kind == "torch.optim.AdamW":
        return torch.optim.AdamW(parameters, lr=3e-3)
    return LibTorchAdam(parameters, lr=3e-3, decay=0.0 if kind == "adam" else 0.01)


def applied(model: nn.Module, settings: dict[str, str]) -> nn.Module:
    if settings.get("by") != "fsdp2":
        return sp.apply(model, settings["plan"], **({"on_deviation": "replan"} if settings.get("deviation") else {}))
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def set_sync(model: nn.Module, settings: dict[str, str], value: bool) -> None:
    if settings.get("by") == "fsdp2":
        model.set_requires_gradient_sync(value)
    else:
        sp.set_requires_gradient_sync(model, value)


def main() -> None:
    settings = dict(argument.split("=", 1) for argument in sys.argv[1:])
    rank, ranks = int(settings.get("rank", 0)), int(settings.get("ranks", 1))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{settings['store']}", rank=rank, world_size=ranks)
    tokens, vocabulary = gpt.load_tokens()
    config = gpt.Config(
        vocabulary=vocabulary, layers=int(settings.get("layers", 3)), width=int(settings.get("width", 44))
    )
    torch.manual_seed(int(settings.get("seed", 0)))
    model = gpt.Gpt(config)
    for name, parameter in model.named_parameters():
        if settings.get("frozen") and name.startswith(settings["frozen"]):
            parameter.requires_grad_(False)
    model = applied(model, settings)
    optimizer = optimizer_of(settings.get("optimizer", "adamw"), model)
    if "load" in settings:
        sp.load(settings["load"], model, optimizer, strict=False)
    first, rows, microbatches = (
        int(settings.get("first", 0)), int(settings.get("rows", 2)), int(settings.get("microbatches", 1)),
    )
    for step in range(first, first + int(settings.get("steps", 3))):
        line = f"step {step}"
        if settings.get("evaluate") == "yes":
            with torch.no_grad():
                ids, targets = gpt.batch_of(tokens, config.context, 1000 + step, rank * rows, rows)
                line += f" evaluation {bits(gpt.loss_fn(model(ids), targets))}"
        for m in range(microbatches):
            ids, targets = gpt.batch_of(tokens, config.context, step, (rank * microbatches + m) * rows, rows)
            if settings.get("no_sync") == "yes":
                set_sync(model, settings, m + 1 == microbatches)
            loss = gpt.loss_fn(model(ids), targets) / microbatches
            (loss * 1024.0 if settings.get("scaler") == "yes" else loss).backward()
            line += f" loss {bits(loss)}"
        if settings.get("scaler") == "yes":
            for parameter in model.parameters():
                parameter.grad.div_(1024.0)
        if "clip" in settings:
            norm = (
                sp.clip_grad_norm_(model, float(settings["clip"]))
                if settings.get("by") != "fsdp2"
                else nn.utils.clip_grad_norm_(model.parameters(), float(settings["clip"]))
            )
            line += f" norm {bits(norm.full_tensor() if hasattr(norm, 'full_tensor') else norm)}"
        optimizer.step()
        optimizer.zero_grad()
        print(line, flush=True)
    if "save" in settings:
        sp.save(settings["save"], model, optimizer)
    print("deviation ", flush=True)
    sys.stdout.flush()
    os._exit(0)  # groups' threads end with the process


if __name__ == "__main__":
    main()
