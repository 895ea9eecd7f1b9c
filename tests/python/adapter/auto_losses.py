# SPDX-License-Identifier: Apache-2.0
"""Losses that call a unit several times, next to real FSDP2: in chunks, each with a backward of its own inside of the loss (torchtitan's), with the
setters that it makes around them and without."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from adapter_workers import DEVICE
from chunked_losses import Body, GivenGradient
from equivalence import largest_difference, local
from torch.distributed.fsdp import fully_shard

import shardplan.torch as sp

STEPS = 4


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
    return GivenGradient.apply(hidden, torch.cat(gradients), total)


def traced(batch: int, seq: int) -> tuple:
    """What `shardplan trace` calls."""
    model = Body()
    return model, (torch.zeros(4, 8),), lambda hidden: _in_chunks(model, hidden, sets=False)


def _plan(folder: pathlib.Path) -> str:
    """Of the trace, by the commands; made by the first rank. The strategy has no program: the trace's calls are the step's."""
    trace, plan = folder / "chunks.trace.json", folder / "chunks.plan.json"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        units = [argument for module in ("layers.*", "head") for argument in ("--unit", module)]
        program = pathlib.Path(os.environ["SHARDPLAN_BUILD"], "bin", "shardplan")
        path = os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])
        for command in (
            [sys.executable, "-m", "shardplan.tracer", "auto_losses:traced", "-o", str(trace), "-q"],
            [str(program), "plan", str(trace), "--cluster", "h100", "--ranks", str(dist.get_world_size()), *units, "--optimizer", "sgd", "-q", "-o", str(plan)],
        ):
            done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stderr}")
    dist.barrier()
    return str(plan)


def _trained(mark: Callable, root: Callable, sets: bool) -> dict[str, torch.Tensor]:
    """Losses, gradients and parameters of every step."""
    torch.manual_seed(2)
    model = Body().to(DEVICE)
    for layer in [*model.layers, model.head]:
        mark(layer)
    root(model)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), {}
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = _in_chunks(model, model(torch.randn(4, 8, generator=generator).to(DEVICE)), sets)
        loss.backward()
        seen[f"loss {step}"] = loss.detach()
        for fqn, parameter in model.named_parameters():
            seen[f"gradient of {fqn} {step}"] = local(parameter.grad).clone()
        optimizer.step()
        optimizer.zero_grad()
    return seen | {fqn: local(parameter).detach() for fqn, parameter in model.named_parameters()}


def backwards_inside_the_loss(how: str, folder: str) -> tuple[float, str]:
    """how: under sp.auto "with" the setters around the chunks or "without", or by a "planned" step that must not deviate."""
    theirs = _trained(fully_shard, fully_shard, how == "with")
    if how == "planned":
        plan = _plan(pathlib.Path(folder))
        return largest_difference(_trained(lambda layer: None, lambda model: sp.apply(model, plan), sets=False), theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps on demand
        ours = _trained(sp.unit, lambda model: sp.auto(model, plans=None, quiet=True, optimizer="sgd"), how == "with")
    return largest_difference(ours, theirs)


LOSSES = ("with", "without", "planned")
