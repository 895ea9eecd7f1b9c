# SPDX-License-Identifier: Apache-2.0
"""One rank of train.cc's training in Python: the same plan, rows and optimizer; prints the same losses.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, as for train.cc.
"""

from __future__ import annotations

import argparse
import math
import os

import gpt
import torch
import torch.distributed as dist

import shardplan.torch as sp


class LibTorchAdam(torch.optim.Optimizer):
    """torch::optim::Adam, and AdamW with a decay, operator by operator: torch.optim's have lerp in place of two of
    them, which rounds in another way."""

    def __init__(self, parameters, lr: float, decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
                state["step"] += 1
                if group["decay"]:
                    parameter.mul_(1 - group["lr"] * group["decay"])
                state["exp_avg"].mul_(0.9).add_(parameter.grad, alpha=1 - 0.9)
                state["exp_avg_sq"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=1 - 0.999)
                correction = math.sqrt(1 - 0.999 ** state["step"])
                denominator = (state["exp_avg_sq"].sqrt() / correction).add_(1e-8)
                parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - 0.9 ** state["step"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=12, help="rows of a step, over all ranks (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.device == "cuda":
        rank, gpus = int(os.environ["RANK"]), torch.cuda.device_count()
        if int(os.environ["WORLD_SIZE"]) > gpus:  # ranks that share a GPU: NCCL takes them for ranks of several hosts
            os.environ.setdefault("NCCL_HOSTID", f"gpt_cpp-{rank}")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % gpus)
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = args.batch // ranks
    tokens, vocabulary = gpt.load_tokens()
    config = gpt.Config(vocabulary=vocabulary)
    torch.manual_seed(0)
    model = sp.apply(gpt.Gpt(config).to(args.device), args.plan)
    optimizer = LibTorchAdam(model.parameters(), lr=args.lr, decay=0.01)
    for step in range(args.steps):
        ids, targets = (
            batch.to(args.device) for batch in gpt.batch_of(tokens, config.context, step, rank * rows, rows)
        )
        loss = gpt.loss_fn(model(ids), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.tensor([loss.item()], dtype=torch.float64)
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1} loss {mean.item() / ranks:.9f}", flush=True)
    os._exit(0)  # groups' threads end with the process


if __name__ == "__main__":
    main()
