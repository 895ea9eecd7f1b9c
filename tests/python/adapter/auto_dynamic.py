# SPDX-License-Identifier: Apache-2.0
"""Jobs whose steps differ, next to real FSDP2: what test_auto_features.py runs on the ranks of experts, dropped layers,
and a search meanwhile."""

from __future__ import annotations

import pathlib
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
from adapter_workers import DEVICE
from equivalence import largest_difference, whole
from equivalence_models import loss_of
from torch.distributed.fsdp import fully_shard

import shardplan.torch as sp
from shardplan.torch._replay.applied import applied_to

CLUSTER = pathlib.Path(__file__).resolve().parents[3] / "examples" / "train_gpt" / "cluster.json"


class Experts(nn.Module):
    """A block of which a forward runs some parts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor, which: tuple[int, ...]) -> torch.Tensor:
        y = self.norm(x)
        return x + sum(self.experts[number](y) for number in which)


class Hidden:
    """Layers to skip, which no argument tells from others."""

    def __init__(self, layer: int) -> None:
        self._layer = layer

    def __contains__(self, layer: int) -> bool:
        return layer == self._layer


class Dynamic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, which: tuple[int, ...] = (0, 1, 2), skip: tuple[int, ...] = ()) -> torch.Tensor:
        x = self.stem(x)
        for number, layer in enumerate(self.layers):
            if number not in skip:
                x = layer(x, which)
        return self.head(x)


# Steps of micro-batches (does its backward reduce, and arguments of the forward, by rank); plans, that of the module
# tree among them; steps that leave their plan.
DYNAMIC: dict[str, tuple[list[list[tuple[bool, dict]]], int, int]] = {
    "unused_expert": ([[(True, {"which": (0, 2)})]] * 4, 2, 1),
    "experts_alternate": ([[(True, {"which": (step % 2,)})] for step in range(6)], 3, 3),
    "unused_expert_accumulated": ([[(False, {"which": (0,)}), (True, {"which": (0, 2)})]] * 4, 2, 1),
    "layer_drop": ([[(True, {"skip": (step % 3,)})] for step in range(7)], 4, 4),
    "layer_drop_accumulated": ([[(False, {"skip": (0,)}), (True, {"skip": (1,)})]] * 4, 2, 1),
    "layers_dropped_unseen": ([[(True, {"skip": Hidden((0, 1, 1)[step % 3])})] for step in range(12)], 3, 3),
    "unused_on_one_rank": ([[(True, {"which": ((0, 2), (0, 1))})]] * 4, 3, 1),
}


def dynamic(name: str) -> str:
    """Numbers are FSDP2's, each way that steps go has a plan that is made once, and steps are foreseen."""
    steps, plans, left = DYNAMIC[name]

    def trained(model: nn.Module) -> dict[str, torch.Tensor]:
        if name == "unused_on_one_rank":
            model.set_reduce_scatter_unused_params(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        seen = {}
        for step, microbatches in enumerate(steps):
            for number, (reduces, arguments) in enumerate(microbatches):
                model.set_requires_gradient_sync(reduces)
                if isinstance(arguments.get("which", (0,))[0], tuple):
                    arguments = {"which": arguments["which"][dist.get_rank()]}
                generator = torch.Generator().manual_seed(100 * step + 10 * number + dist.get_rank())
                loss = loss_of(model(torch.randn(3, 4, generator=generator).to(DEVICE), **arguments))
                loss.backward()
                seen[f"loss {step}.{number}"] = loss.detach()
            for fqn, parameter in model.named_parameters():
                seen[f"{fqn} has a gradient {step}"] = torch.tensor(float(parameter.grad is not None))
            optimizer.step()
            optimizer.zero_grad()
        return seen | {fqn: whole(parameter) for fqn, parameter in model.named_parameters()}

    def model() -> nn.Module:
        torch.manual_seed(1)
        return Dynamic().to(DEVICE)

    ours, theirs = sp.auto(model(), quiet=True, plans=None), model()
    for layer in theirs.layers:
        fully_shard(layer)
    fully_shard(theirs)
    following, deviated = applied_to(ours).following, []
    follow = following.follow

    def count(log: list[tuple]) -> None:
        deviated.append(log)
        follow(log)

    following.follow = count
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        difference = largest_difference(trained(ours), trained(theirs))
    if difference != (0.0, ""):
        return f"differs: {difference}"
    if following.unplannable:
        return f"not planned: {following.unplannable_because}"
    found = len(following.kept), len(deviated)
    return "" if found == (plans, left) else f"(plans, steps that left one): {found}, expected {(plans, left)}"


def searched_meanwhile() -> tuple[float, str]:
    """Steps that go several ways, with plans of their own, while the search runs beside them; then by its plan."""
    torch.manual_seed(1)
    ours = Dynamic().to(DEVICE)
    torch.manual_seed(1)
    theirs = Dynamic().to(DEVICE)
    sp.auto(
        ours, policy="optimize", budget="1GiB", cluster=CLUSTER, search_seconds=1, loss=loss_of, plans=None, quiet=True
    )
    for layer in theirs.layers:
        fully_shard(layer)
    fully_shard(theirs)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False) for model in (ours, theirs)]
    beside = applied_to(ours).following
    until, steps = time.monotonic() + 100, 0
    going_on = torch.ones(1, device=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while going_on.item():
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * steps + dist.get_rank())).to(DEVICE)
            for model, optimizer in zip((ours, theirs), optimizers):
                loss_of(model(x, skip=(steps % 2,))).backward()
                optimizer.step()
                optimizer.zero_grad()
            steps += 1
            taken = applied_to(ours).following is not beside
            going_on.fill_(time.monotonic() < until and not (taken and steps % 4 == 0))
            dist.all_reduce(going_on, op=dist.ReduceOp.MAX)  # as many steps on each rank
    if applied_to(ours).following is beside or len(beside.kept) < 3:
        return 1.0, f"{len(beside.kept)} plans beside the search"
    difference, where = largest_difference(
        *({fqn: whole(parameter) for fqn, parameter in model.named_parameters()} for model in (ours, theirs))
    )
    return (0.0, "") if difference < 1e-5 else (difference, where)
