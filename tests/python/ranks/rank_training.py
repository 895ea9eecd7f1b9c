# SPDX-License-Identifier: Apache-2.0
"""A rank that trains three layers by a plan: `python rank_training.py PLAN TIMEOUT_S STEPS`, under torchrun's
environment."""

from __future__ import annotations

import ctypes
import os
import sys
import time

import torch
import torch.distributed as dist

WIDTH = 64


class ThreeLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        # The gradient of the root's output is there before that of the last layer's, as the trace has it.
        return x.clone()


def train(plan: str, timeout_s: float | None, steps: int, say) -> None:
    import shardplan.torch as sp

    torch.manual_seed(0)
    model = sp.apply(ThreeLayers(), plan, timeout=timeout_s)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(model))  # some cycle holds it until the process ends
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        say(f"rank {dist.get_rank()}: step {step} took")
        time.sleep(0.02)


def main(plan: str, timeout_s: str, steps: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # its own timeout is 1,800 s
    print(f"rank {dist.get_rank()}: is in the group", file=sys.stderr, flush=True)
    plan = plan.replace("%RANK%", os.environ["RANK"])
    train(plan, float(timeout_s), int(steps), lambda text: print(text, file=sys.stderr, flush=True))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
