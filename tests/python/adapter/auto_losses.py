# SPDX-License-Identifier: Apache-2.0
"""Losses that call a unit several times, next to real FSDP2: in chunks, each with a backward of its own inside of the loss (torchtitan's), with the
setters that it makes around them and without."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from adapter_workers import DEVICE
from equivalence import largest_difference, local
from torch.distributed.fsdp import fully_shard

import shardplan.torch as sp

STEPS = 4


class _GivenGradient(torch.autograd.Function):
    """A loss whose gradient of the hidden states is there already."""

    @staticmethod
    def forward(ctx, hidden, gradient, loss):
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx, outer):
        return ctx.saved_tensors[0] * outer, None, None


class _Body(nn.Module):
    """The loss calls its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(8, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def _in_chunks(model: nn.Module, hidden: torch.Tensor, sets: bool) -> torch.Tensor:
    head, chunks = model.head, [chunk.detach().requires_grad_() for chunk in hidden.chunk(2)]
    if sets:
        head.set_reshard_after_forward(False)
        head.set_reshard_after_backward(False)
        head.set_requires_gradient_sync(False, recurse=False)
        head.unshard()
    total, gradients = torch.zeros((), device=hidden.device), []
    for number, chunk in enumerate(chunks):
        if sets and number + 1 == len(chunks):
            head.set_requires_gradient_sync(True, recurse=False)
        loss = head(chunk).square().mean()
        loss.backward()
        total = total + loss.detach()
        gradients.append(chunk.grad)
    if sets:
        head.set_reshard_after_forward(True)
        head.set_reshard_after_backward(True)
        head.set_requires_gradient_sync(True, recurse=False)
        head.reshard()
    return _GivenGradient.apply(hidden, torch.cat(gradients), total)


def backwards_inside_the_loss(sets: str) -> tuple[float, str]:
    """Losses, gradients and parameters of every step. sets: "with" the setters around the chunks, or "without"."""

    def trained(mark: Callable, root: Callable) -> dict[str, torch.Tensor]:
        torch.manual_seed(2)
        model = _Body().to(DEVICE)
        for layer in [*model.layers, model.head]:
            mark(layer)
        root(model)
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), {}
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            loss = _in_chunks(model, model(torch.randn(4, 8, generator=generator).to(DEVICE)), sets == "with")
            loss.backward()
            seen[f"loss {step}"] = loss.detach()
            for fqn, parameter in model.named_parameters():
                seen[f"gradient of {fqn} {step}"] = local(parameter.grad).clone()
            optimizer.step()
            optimizer.zero_grad()
        return seen | {fqn: local(parameter).detach() for fqn, parameter in model.named_parameters()}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps on demand
        ours = trained(sp.unit, lambda model: sp.auto(model, plans=None, quiet=True, optimizer="sgd"))
    return largest_difference(ours, trained(fully_shard, fully_shard))


LOSSES = ("with", "without")
