# SPDX-License-Identifier: Apache-2.0
"""Jobs that save in the background again and again, in place of the last checkpoint, killed at random moments: what is
there is whole, and of one step. `killed_saves.py [--kills 10] [--seed 1]`; run by tools/nightly."""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import shardplan.torch as sp
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

RANKS = 2
OF_A_JOB = 1000  # steps


def _rank(rank: int, store: str, folder: str, first: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model = fully_shard(nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))))
    for step in range(first, first + OF_A_JOB):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        sp.save(folder, model, asynchronous=True, replace=True)
        if rank == 0:
            print(step, flush=True)


def _job(folder: str, first: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        mp.start_processes(_rank, (f"{scratch}/store", folder, first), nprocs=RANKS, start_method="fork")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job")
    parser.add_argument("--first", type=int)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.job:
        return _job(args.job, args.first)
    chance = random.Random(args.seed)
    program = pathlib.Path(os.environ["SHARDPLAN_BUILD"], "bin", "shardplan")
    with tempfile.TemporaryDirectory() as scratch:
        last = pathlib.Path(scratch, "last")
        for number in range(args.kills):
            process = subprocess.Popen(
                [sys.executable, __file__, "--job", str(last), "--first", str(number * OF_A_JOB)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for _ in range(3):
                process.stdout.readline()
            time.sleep(chance.random() * 0.5)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            whole = pathlib.Path(scratch, f"{number}.pt")
            subprocess.run(
                [program, "reshard-checkpoint", last, whole, "--format", "torch_save", "-q"],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            values = {
                float(value)
                for tensor in torch.load(whole, weights_only=True)["model"].values()
                for value in tensor.unique()
            }
            assert len(values) == 1, f"seed {args.seed}, kill {number}: a checkpoint of several steps: {values}"
            step = values.pop()
            assert step >= number * OF_A_JOB, f"seed {args.seed}, kill {number}: step {step} is of an earlier job"
            left = [path.name for path in pathlib.Path(scratch).glob(".shardplan-*")]
            print(
                f"kill {number}: step {step:.0f} is there, "
                f"{'a part of another lies beside it' if left else 'nothing beside it'}",
                flush=True,
            )
        print(f"{args.kills} kills: the checkpoint was whole each time")


if __name__ == "__main__":
    main()
