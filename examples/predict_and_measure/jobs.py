# SPDX-License-Identifier: Apache-2.0
"""The two jobs: a model, its batch and its optimizer, for `shardplan trace jobs:demo` and for the training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn as nn
from model import Gpt, GptConfig, loss_fn
from train import load_tokens


@dataclasses.dataclass(frozen=True)
class Job:
    config: GptConfig
    batch: int
    sequence: int
    optimizer: Callable[..., torch.optim.Optimizer]
    planned_optimizer: str  # as `shardplan plan --optimizer` has it
    learning_rate: float
    steps: int  # that are measured in a run
    reference: bool = False  # the machine is measured by it; not predicted

    def model(self) -> nn.Module:
        return Gpt(self.config)

    def traced(self) -> tuple:
        """What `shardplan trace` calls: model, inputs and loss."""
        ids, targets = (torch.zeros(self.batch, self.sequence, dtype=torch.long) for _ in range(2))
        return self.model(), (ids,), lambda logits: loss_fn(logits, targets)


# Of examples/train_gpt and tests/benchmarks/bench_adapter_gpt_step.py. On CPU ranks the default of both optimizers is a loop over the parameters, and AdamW's counts of
# steps are CPU tensors as everything else: a plan has them in device memory where it is "capturable".
JOBS = {
    "demo": Job(GptConfig(vocabulary=load_tokens()[1]), 8, 32, torch.optim.AdamW, "adamw-forloop-capturable", 3e-3, 30),
    "large": Job(GptConfig(vocabulary=16_384, context=64, layers=12, heads=12, width=768), 1, 64, torch.optim.SGD, "sgd-forloop", 0.01, 6),
}


# Of other sizes, to measure by: what an operator takes amid a training, with cold caches and ranks that share cores, no loop over one operator shows.
JOBS |= {
    "reference_small": Job(GptConfig(vocabulary=61, context=48, layers=2, heads=2, width=24), 4, 48, torch.optim.AdamW, "adamw-forloop-capturable", 3e-3, 30, True),
    "reference_large": Job(GptConfig(vocabulary=8192, context=128, layers=6, heads=8, width=512), 1, 128, torch.optim.SGD, "sgd-forloop", 0.01, 8, True),
}


def reference_small() -> tuple:
    return JOBS["reference_small"].traced()


def reference_large() -> tuple:
    return JOBS["reference_large"].traced()


def demo() -> tuple:
    return JOBS["demo"].traced()


def large() -> tuple:
    return JOBS["large"].traced()
