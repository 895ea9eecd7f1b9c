# SPDX-License-Identifier: Apache-2.0
"""Training where each rank calls other experts, which are modules: other gradients are made on each. Next to the same
model in one process."""

from __future__ import annotations

import warnings

import shardplan.torch as sp
import torch
import torch.distributed as dist
import torch.nn as nn
from shardplan.torch._model.outline import outline

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, which: list[int]) -> torch.Tensor:
        h = self.inp(x)
        for k in which:
            h = h + torch.tanh(self.experts[k](x))
        return h


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, which: list[int]) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, which)
        return self.head(x)


def make() -> Experts:
    torch.manual_seed(0)
    return Experts()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def error(model: nn.Module, alone: nn.Module, step: int, sets: list[list[int]]) -> float:
    """The largest difference between the model's gradients and those of the same model in one process. One that nobody
    made is None, or zeros."""
    ranks = dist.get_world_size()
    alone.load_state_dict({name: p.full_tensor().detach() for name, p in model.named_parameters()})
    alone.zero_grad()
    for rank in range(ranks):
        (alone(batch(step, rank), sets[rank]).square().mean() / ranks).backward()
    largest = 0.0
    for (name, ours), (_, theirs) in zip(model.named_parameters(), alone.named_parameters()):
        if ours.grad is None and theirs.grad is not None:
            raise AssertionError(f"{name} has no gradient in step {step}")
        if ours.grad is not None:
            expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            largest = max(largest, (ours.grad.full_tensor() - expected).abs().max().item())
    return largest


def train(model: nn.Module, sets_of_step: list[list[list[int]]]) -> tuple[float, list[str]]:
    """By step and rank: which experts. The largest error, and what was warned."""
    alone, rank, largest = make(), dist.get_rank(), 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, sets in enumerate(sets_of_step):
            model(batch(step, rank), sets[rank]).square().mean().backward()
            largest = max(largest, error(model, alone, step, sets))
            optimizer.step()
            optimizer.zero_grad()
    return largest, [str(one.message) for one in caught]


def auto(sets_of_step: list[list[list[int]]]) -> tuple[float, list[str]]:
    model = make()
    for layer in model.layers:
        sp.unit(layer)
    return train(sp.auto(model, quiet=True, plans=None), sets_of_step)


def stops(plan: str, sets_of_step: list[list[list[int]]]) -> list[str]:
    """The error of each step under on_deviation="stop"; the first one ends it."""
    model = sp.apply(make(), plan)
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, sets in enumerate(sets_of_step):
        try:
            model(batch(step, rank), sets[rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        except RuntimeError as raised:
            return [f"step {step}: {raised}"]
    return []


def experts_are_units(sets_of_step: list[list[list[int]]]) -> str:
    """Each expert is gathered where it is called: ranks that call others cannot go on."""
    model = make()
    for layer in model.layers:
        for expert in layer.experts:
            sp.unit(expert)
        sp.unit(layer)
    model = sp.auto(model, quiet=True, plans=None)
    try:
        train(model, sets_of_step)
    except RuntimeError as raised:
        return str(raised)
    return ""


def outline_of(which: list[int]) -> dict:
    """The trace of a step that calls these experts alone: the model's outline without the gradients of the others."""
    model = make()
    trace = outline(model)
    unused = {
        i
        for i, entry in enumerate(trace["parameters"])
        if ".experts." in entry["fqn"] and int(entry["fqn"].split(".")[3]) not in which
    }
    for backward in trace["backwards"]:
        backward["events"] = [
            event for event in backward["events"] if event[0] != "param_grad" or event[1] not in unused
        ]
    return trace
