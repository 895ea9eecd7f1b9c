# SPDX-License-Identifier: Apache-2.0
"""The cases that the adapter and real FSDP2 both run, and the functions that run them on a rank."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from adapter_workers import DEVICE

ROOT = pathlib.Path(__file__).resolve().parents[3]
for folder in (ROOT / "examples" / "train_gpt", ROOT / "tools" / "python"):
    sys.path.insert(0, str(folder))

import model as gpt  # noqa: E402

STEPS = 3  # the first, and two by the steady plan
BATCH, SEQUENCE = 3, 16


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    config: gpt.GptConfig = gpt.GptConfig()
    units: tuple[str, ...] = ("blocks.*",)
    frozen: tuple[str, ...] = ()  # FQN prefixes that need no gradient
    optimizer: str = "sgd"
    reshard_after_forward: bool | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    forward_prefetch: int = 0


UNTIED = gpt.GptConfig(tied=False, layers=2, width=36)
CASES = {
    case.name: case
    for case in (
        Case("default"),
        Case("adamw", optimizer="adamw"),
        Case("untied", config=UNTIED, optimizer="adamw"),
        Case("keep_unsharded", reshard_after_forward=False),
        Case("reshard_root_too", reshard_after_forward=True),
        Case("forward_prefetch", forward_prefetch=1),
        Case("root_only", units=()),
        Case("nested_units", units=("blocks.*.attention", "blocks.*")),
        Case("bf16", param_dtype="bfloat16", reduce_dtype="float32", optimizer="adamw"),
        Case("bf16_reduce", param_dtype="bfloat16"),
        Case("frozen_prefix", frozen=("tokens", "positions", "blocks.0", "head"), optimizer="adamw"),
        Case("frozen_mixed", frozen=("blocks.1.norm1", "blocks.2.attention")),
    )
}


def make_model(case: Case) -> nn.Module:
    """The same values on every rank and in every run."""
    torch.manual_seed(7)
    model = gpt.Gpt(case.config)
    for name, parameter in model.named_parameters():
        if any(name.startswith(prefix) for prefix in case.frozen):
            parameter.requires_grad_(False)
    return model


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if case.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-2)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batch_of(case: Case, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(case.config.vocabulary, (BATCH, SEQUENCE + 1), generator=generator).to(DEVICE)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def with_fsdp2(case: Case, model: nn.Module) -> nn.Module:
    """Real FSDP2 with the case's knobs."""
    import fnmatch

    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = model.to(DEVICE)

    def dtype(name: str | None) -> torch.dtype | None:
        return name and getattr(torch, name)

    options = {"mp_policy": MixedPrecisionPolicy(dtype(case.param_dtype), dtype(case.reduce_dtype))}
    if case.reshard_after_forward is not None:
        options["reshard_after_forward"] = case.reshard_after_forward
    for pattern in case.units:
        depth = pattern.count(".")
        for name, module in model.named_modules():
            if name.count(".") == depth and fnmatch.fnmatch(name, pattern):
                fully_shard(module, **options)
    fully_shard(model, **options)
    if case.forward_prefetch:
        units = [*model.blocks]
        model.set_modules_to_forward_prefetch([units[0]])
        for unit, following in zip(units, units[1:]):
            unit.set_modules_to_forward_prefetch([following])
    return model


def with_plan(model: nn.Module, plan: str) -> nn.Module:
    import shardplan.torch as sp

    return sp.apply(model.to(DEVICE), plan)


@dataclasses.dataclass
class Run:
    """The result of a training run: per step the loss; at the end this rank's part of every parameter and optimizer
    state, named by how it was cut. Parts that are equal on every rank are equal wholes, without a collective for
    each."""

    losses: list[torch.Tensor]
    parameters: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def part(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    if not hasattr(tensor, "to_local"):
        return name, tensor.detach().clone()
    cut = f"{list(tensor.shape)} {tensor.placements} on {tensor.device_mesh.mesh.tolist()}"
    return f"{name}, {cut}", tensor.detach().to_local().clone()


def train(case: Case, model: nn.Module, steps: int = STEPS) -> Run:
    optimizer = make_optimizer(case, model)
    losses = []
    for step in range(steps):
        ids, targets = batch_of(case, step, dist.get_rank())
        loss = gpt.loss_fn(model(ids), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    parameters = dict(part(name, p) for name, p in model.named_parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    states = dict(
        part(f"{names[id(p)]}.{key}", value)
        for p, state in optimizer.state.items()
        for key, value in state.items()
        if torch.is_tensor(value)
    )
    return Run(losses, parameters, states)


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, str]:
    """(largest relative difference, its name); (0.0, "") only when all are equal bit for bit, names included."""
    if ours.keys() != theirs.keys():
        return float("inf"), f"names differ: {sorted(ours.keys() ^ theirs.keys())}"
    worst = (0.0, "")
    for name, value in ours.items():
        if torch.equal(value, theirs[name]):
            continue
        if value.shape != theirs[name].shape:
            return float("inf"), name
        scale = theirs[name].abs().max().clamp_min(1e-30)
        worst = max(worst, (max(float((value - theirs[name]).abs().max() / scale), 1e-30), name))
    return worst


def compare_case(name: str, plan: str) -> dict[str, tuple[float, str]]:
    """On a rank: trains the case both ways -> the largest difference of losses, parameters and optimizer states."""
    case = CASES[name]
    ours = train(case, with_plan(make_model(case), plan))
    theirs = train(case, with_fsdp2(case, make_model(case)))
    losses = [dict(zip(map(str, range(STEPS)), run.losses)) for run in (ours, theirs)]
    return {
        "losses": largest_difference(*losses),
        "parameters": largest_difference(ours.parameters, theirs.parameters),
        "optimizer states": largest_difference(ours.states, theirs.states),
    }


def compare_cases(plans: dict[str, str]) -> dict[str, dict]:
    """compare_case for each (case, plan)."""
    return {name: compare_case(name, plan) for name, plan in plans.items()}
