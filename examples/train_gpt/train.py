# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT on the same batches twice, side by side on the same ranks: once by replaying a shardplan plan,
once with PyTorch's own FSDP2 (fully_shard). Prints both losses each step and compares every parameter at the end.

    .venv/bin/python examples/train_gpt/train.py --steps 20 --ranks 2 --plan plan.json

Without --plan the plan is made first (make_plan.py). Progress goes to standard error, the verdict to standard output.
Exit code 0: equal bit for bit; 1: they differ.
"""

from __future__ import annotations

import argparse
import gc
import os
import pathlib
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools" / "python")]

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import make_plan
import model as gpt

BATCH = 8


def load_tokens() -> tuple[torch.Tensor, int]:
    """The text as character ids, and the number of different characters."""
    text = (HERE / "text.txt").read_text()
    alphabet = sorted(set(text))
    index = {character: i for i, character in enumerate(alphabet)}
    return torch.tensor([index[character] for character in text]), len(alphabet)


def traced_gpt() -> torch.nn.Module:
    """The model as `shardplan trace train:traced_gpt` builds it."""
    return gpt.Gpt(gpt.GptConfig(vocabulary=load_tokens()[1]))


def batch_of(tokens: torch.Tensor, context: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's own batch of a step: the same in both runs."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(tokens) - context - 1, (BATCH,), generator=generator)
    rows = torch.stack([tokens[start : start + context + 1] for start in starts.tolist()])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def reference_model(config: gpt.GptConfig, seed: int) -> torch.nn.Module:
    """The model under real FSDP2: every block a unit, the root holds the rest."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = gpt.Gpt(config)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def replayed_model(config: gpt.GptConfig, seed: int, plan: str) -> torch.nn.Module:
    import shardplan.torch as sp

    torch.manual_seed(seed)
    return sp.apply(gpt.Gpt(config), plan)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch) -> torch.Tensor:
    ids, targets = batch
    loss = gpt.loss_fn(model(ids), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def global_mean(loss: torch.Tensor) -> float:
    loss = loss.clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def differing_parameters(first: torch.nn.Module, second: torch.nn.Module) -> list[str]:
    reference = dict(second.named_parameters())
    return [
        name
        for name, parameter in first.named_parameters()
        if not torch.equal(parameter.full_tensor(), reference[name].full_tensor())
    ]


def train_side_by_side(rank: int, args: argparse.Namespace) -> bool:
    """True when losses and parameters are equal bit for bit."""
    tokens, vocabulary = load_tokens()
    config = gpt.GptConfig(vocabulary=vocabulary)
    replayed = replayed_model(config, args.seed, args.plan)
    reference = reference_model(config, args.seed)
    optimizers = {m: torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (replayed, reference)}

    def say(text: str, file=sys.stderr) -> None:
        if rank == 0:
            print(text, file=file, flush=True)

    count = sum(p.numel() for p in replayed.parameters())
    say(f"GPT with {count:,} parameters, {config.layers} blocks, {args.ranks} ranks (CPU, gloo), AdamW")
    say("step   loss by the plan   loss by FSDP2   difference")
    losses_equal = True
    start = time.perf_counter()
    for step in range(args.steps):
        batch = batch_of(tokens, config.context, step, rank)
        losses = [train_step(m, optimizers[m], batch) for m in (replayed, reference)]
        losses_equal &= torch.equal(*losses)
        by_plan, by_fsdp2 = (global_mean(loss) for loss in losses)
        say(f"{step:4d}   {by_plan:16.7f}   {by_fsdp2:13.7f}   {by_plan - by_fsdp2:.1e}")
    wrong = differing_parameters(replayed, reference)
    say(f"{args.steps} steps of both in {time.perf_counter() - start:.1f} s")
    say(f"losses equal: {'bit for bit' if losses_equal else 'NO'}", sys.stdout)
    say(f"parameters equal: {'bit for bit' if not wrong else 'NO, ' + ', '.join(wrong) + ' differ'}", sys.stdout)
    return losses_equal and not wrong


def worker(rank: int, args: argparse.Namespace, store: str, verdict: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    if not train_side_by_side(rank, args):
        pathlib.Path(f"{verdict}.{rank}").write_text("differs")
    dist.barrier()
    gc.collect()  # models hold the process groups, whose threads must end before the interpreter does
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="local CPU ranks (default: %(default)s)")
    parser.add_argument("--plan", help="plan document for this model and number of ranks (default: made now)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        if args.plan is None:
            path = pathlib.Path(folder)
            trace = make_plan.make_trace(path, "train:traced_gpt", HERE, BATCH, gpt.GptConfig.context)
            args.plan = str(make_plan.make_plan(path, trace, args.ranks, "plan", "--unit", "blocks.*"))
        verdict = os.path.join(folder, "verdict")
        mp.spawn(worker, (args, os.path.join(folder, "store"), verdict), nprocs=args.ranks)
        return 1 if list(pathlib.Path(folder).glob("verdict.*")) else 0


if __name__ == "__main__":
    sys.exit(main())
