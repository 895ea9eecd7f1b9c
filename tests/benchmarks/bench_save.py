# SPDX-License-Identifier: Apache-2.0
"""The cost of a save to a training loop: steps of a model on local CPU ranks without a save, with one at once, and with
one in the background.

    .venv/bin/python tests/benchmarks/bench_save.py [--ranks 2] [--width 768] [--layers 8] [--steps 8] [--saves 3]

Prints the median of a step, the seconds for which a save holds the loop (at once; in the background, the end included),
and the steps that ran beside a background save. All are ratios to the undisturbed step. Both ranks write to one disk,
and share the cores with the thread that writes."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "python"))

import shardplan.torch as sp
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


def worker(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(args.width, 4 * args.width), nn.GELU(), nn.Linear(4 * args.width, args.width))
            for _ in range(args.layers)
        )
    )
    for layer in model:
        fully_shard(layer)
    optimizer = torch.optim.AdamW(fully_shard(model).parameters())
    batch = torch.randn(64, args.width)

    def step() -> float:
        begin = time.perf_counter()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    step()  # makes the state
    alone = statistics.median([step() for _ in range(args.steps)])
    at_once, held, beside, saved, size = [], [], [], [], 0
    for number in range(args.saves):
        begin = time.perf_counter()
        sp.save(f"{folder}/now{number}", model, optimizer)
        at_once.append(time.perf_counter() - begin)
        saving = sp.save(f"{folder}/later{number}", model, optimizer, asynchronous=True)
        for _ in range(args.steps):  # as many on all ranks
            took = step()
            if not saving.done():
                beside.append(took)
        saving.wait()
        cost = saving.cost()
        held.append(cost["held_s"])
        saved.append(cost["saved_s"])
        size = cost["bytes"]
        if rank == 0:
            shutil.rmtree(f"{folder}/now{number}")
            shutil.rmtree(f"{folder}/later{number}")
    if rank == 0:
        print(f"{args.ranks} ranks, {size / 2**20:.0f} MiB written by each, a step takes {alone:.3f} s")
        print(
            f"a save at once holds the loop {statistics.median(at_once):.3f} s: "
            f"{statistics.median(at_once) / alone:.2f} steps"
        )
        print(
            f"one in the background {statistics.median(held):.3f} s: {statistics.median(held) / alone:.2f} steps; it "
            f"has its name after {statistics.median(saved):.3f} s"
        )
        if beside:
            print(f"a step beside it takes {statistics.median(beside) / alone:.2f} of one without")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 2), ("width", 768), ("layers", 8), ("steps", 8), ("saves", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(dir=ROOT / "out" if (ROOT / "out").is_dir() else None) as folder:
        mp.start_processes(worker, (args, folder), nprocs=args.ranks, start_method="fork")


if __name__ == "__main__":
    main()
