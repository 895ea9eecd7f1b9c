# SPDX-License-Identifier: Apache-2.0
"""One rank of a job that torchrun starts, starts again after a rank has died, and ends by SIGTERM. It saves in the
background every few steps, and begins with the newest checkpoint that is there.

    torchrun --nproc-per-node 2 --max-restarts 1 elastic.py --steps 12 --folder checkpoints --losses losses.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import time

import model as gpt
import shardplan.torch as sp
import torch
import torch.distributed as dist
import train as train_gpt

EVERY = 3  # steps between checkpoints


def newest(folder: pathlib.Path) -> tuple[int, pathlib.Path | None]:
    """The steps that the newest checkpoint has seen."""
    steps = sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))
    return (steps[-1], folder / f"step_{steps[-1]}") if steps else (0, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="where checkpoints are")
    parser.add_argument(
        "--losses", type=pathlib.Path, required=True, help="what rank 0 appends its steps to, a line each"
    )
    parser.add_argument("--die-at", type=int, help="rank 1 dies before this step, if the job was not started again yet")
    parser.add_argument("--wait-at", type=int, help="before this step the ranks wait for SIGTERM")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    tokens, vocabulary = train_gpt.load_tokens()
    config = gpt.GptConfig(vocabulary=vocabulary)
    model = sp.auto(gpt.Gpt(config), quiet=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first, checkpoint = newest(args.folder)
    if checkpoint is not None:
        sp.load(checkpoint, model, optimizer)
    saving = None
    with sp.stop_on_signal() as stop:
        for step in range(first, args.steps):
            if rank == 1 and step == args.die_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            while step == args.wait_at and not stop.told:
                time.sleep(0.05)
            loss = train_gpt.train_step(model, optimizer, train_gpt.batch_of(tokens, config.context, step, rank))
            loss = train_gpt.global_mean(loss)
            if rank == 0:
                with args.losses.open("a") as file:
                    print(json.dumps({"step": step, "loss": loss, "began_with": first}), file=file)
            ends = stop()
            if ends or (step + 1) % EVERY == 0:
                saving = sp.save(args.folder / f"step_{step + 1}", model, optimizer, asynchronous=True)
            if ends:
                break
    if saving is not None:
        saving.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
