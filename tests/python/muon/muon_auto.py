# SPDX-License-Identifier: Apache-2.0
"""Trainings of `sp.auto(model, optimizer="muon")` with `sp.Muon(model)`, on a rank, next to torch.optim.Muon of whole
matrices with the same gradients."""

from __future__ import annotations

import dataclasses
import json
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
from muon_models import DEVICE, make_mesh, whole

STEPS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    replicas: int = 1
    shards: int = 2
    arguments: dict = dataclasses.field(default_factory=dict)
    turned: bool = False  # blocks run the other way round than they are registered


CASES = (
    Case("shards"),
    Case("over_replicas", replicas=2),
    Case("searched", arguments={"policy": "optimize", "budget": "1GiB", "search_seconds": 2.0}),
    Case("planned_again", turned=True),
)


class Blocks(nn.Module):
    """No size divides by four but those between the blocks."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 130), nn.GELU(), nn.Linear(130, 64)) for _ in range(3))
        self.head = nn.Linear(64, 100)
        self.turned = turned

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in reversed(self.blocks) if self.turned else self.blocks:
            x = x + block(x)
        return self.head(x)


def _owners(model: nn.Module) -> set[int]:
    from shardplan.torch._replay.applied import applied_to

    plan = json.loads(applied_to(model).plan.json)
    return {matrix["owner"] for exchange in plan.get("exchanges", ()) for matrix in exchange["matrices"]}


def compare(case: Case) -> str:
    """On a rank; "": Muon's matrices are those of one process, bit for bit, and each rank owns some."""
    import shardplan.torch as sp

    mesh = make_mesh(case.replicas, case.shards)
    model = sp.auto(
        Blocks(case.turned).to(DEVICE), mesh, optimizer="muon", units=["blocks.*"], plans=None, quiet=True,
        **case.arguments,
    )
    muon = sp.Muon(model, lr=0.02)
    stepped = set(muon.param_groups[0]["params"])
    names = [fqn for fqn, parameter in model.named_parameters() if parameter in stepped]
    if names != [f"blocks.{block}.{layer}.weight" for block in range(3) for layer in (0, 2)]:
        return f"steps {names}"
    rest = torch.optim.AdamW([p for p in model.parameters() if p not in stepped], lr=1e-3)
    alone = {fqn: nn.Parameter(whole(model.get_parameter(fqn)).clone()) for fqn in names}
    single = torch.optim.Muon(alone.values(), lr=0.02)
    for step in range(STEPS):
        numbers = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(100, (4, 9), generator=numbers).to(DEVICE)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            for fqn, parameter in alone.items():
                parameter.grad = whole(model.get_parameter(fqn).grad).clone()
            for optimizer in (muon, rest):
                optimizer.step()
                optimizer.zero_grad()
        single.step()
        texts = [str(warning.message) for warning in said]
        if left := [text for text in texts if "cannot be planned" in text]:
            return f"step {step}: {left[0]}"
    for fqn, parameter in alone.items():
        if not torch.equal(whole(model.get_parameter(fqn)), parameter):
            return f"{fqn}: not that of one process"
    everyone = set(range(case.replicas * case.shards))
    return "" if _owners(model) == everyone else f"owners {_owners(model)}"


def compare_all(cases: list[Case]) -> dict[str, str]:
    return {case.name: compare(case) for case in cases}
