# SPDX-License-Identifier: Apache-2.0
"""One job: some steps of a small GPT by a plan, that begin with a checkpoint and leave one. Its ranks share the rows of
each batch, so jobs with different numbers of ranks train the same.

    restart.py --plan plan.json --ranks 3 --steps 3 6 --load step_3 --losses losses.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import sys
import tempfile

import model as gpt
import shardplan.torch as sp
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import train

ROWS = 12  # of all ranks


def rows_of(tokens: torch.Tensor, context: int, step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the batch of a step."""
    starts = torch.randint(len(tokens) - context - 1, (ROWS,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([tokens[start : start + context + 1] for start in starts.tolist()])[rank::ranks]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def worker(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    torch.manual_seed(0)
    tokens, vocabulary = train.load_tokens()
    config = gpt.GptConfig(vocabulary=vocabulary)
    model = sp.apply(gpt.Gpt(config), args.plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if args.load:
        sp.load(args.load, model, optimizer)
    losses, saving = [], None
    for step in range(*map(int, args.steps)):
        if args.save and step == int(args.save[0]):
            saving = sp.save(args.save[1], model, optimizer, asynchronous=True)
        loss = train.train_step(model, optimizer, rows_of(tokens, config.context, step, rank, args.ranks))
        losses.append(train.global_mean(loss))
    if saving is not None:
        saving.wait()
    if rank == 0:
        pathlib.Path(args.losses).write_text(json.dumps(losses))
        print(
            f"{args.ranks} ranks, steps {args.steps[0]} to {int(args.steps[1]) - 1}"
            + (" after loading" if args.load else ""),
            flush=True,
        )
        if saving is not None:
            print({name: round(value, 4) for name, value in saving.cost().items()}, file=sys.stderr)
    dist.barrier()
    del model, optimizer, saving
    gc.collect()  # models hold the process groups, whose threads must end before the interpreter does
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--steps", nargs=2, metavar=("FIRST", "END"), required=True)
    parser.add_argument("--load", help="checkpoint to begin with")
    parser.add_argument(
        "--save", nargs=2, metavar=("STEP", "FOLDER"), help="saves the state before that step, while it runs"
    )
    parser.add_argument("--losses", required=True, help="where the losses go")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(worker, (args, os.path.join(folder, "store")), nprocs=args.ranks, start_method="fork")


if __name__ == "__main__":
    main()
