# SPDX-License-Identifier: Apache-2.0
"""Losses that call a unit several times, next to real FSDP2 and FSDP1. They run in chunks, each with a backward of its
own inside of the loss (torchtitan's), with the setters that it calls around them and without."""

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
from flat_equivalence import clean
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard

import shardplan.torch as sp
from shardplan.torch._replay.applied import applied_to

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
    """The callable for `shardplan trace`."""
    model = Body()
    return model, (torch.zeros(4, 8),), lambda hidden: _in_chunks(model, hidden, sets=False)


def _plan(folder: pathlib.Path, *flags: str, modules: tuple[str, ...] = ("layers.*", "head")) -> str:
    """The plan of the trace, by the commands with these units and flags; made by the first rank. The strategy has no
    program: the trace's calls are the step's."""
    trace, plan = folder.parent / "chunks.trace.json", folder / "chunks.plan.json"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        units = [argument for module in modules for argument in ("--unit", module)]
        program = pathlib.Path(os.environ["SHARDPLAN_BUILD"], "bin", "shardplan")
        path = os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])
        for command in (
            *(
                []
                if trace.exists()
                else [[sys.executable, "-m", "shardplan.tracer", "auto_losses:traced", "-o", str(trace), "-q"]]
            ),
            [
                str(program), "plan", str(trace), "--cluster", "h100", "--ranks", str(dist.get_world_size()), *units,
                "--optimizer", "sgd", *flags, "-q", "-o", str(plan),
            ],
        ):
            done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stderr}")
    dist.barrier()
    return str(plan)


def _marked(mark: Callable, root: Callable, head: bool = True) -> nn.Module:
    """head: a unit of its own."""
    torch.manual_seed(2)
    model = Body().to(DEVICE)
    for layer in [*model.layers, *([model.head] if head else [])]:
        mark(layer)
    root(model)
    return model


def _trained(model: nn.Module, sets: bool, micro_batches: int = 1) -> dict[str, torch.Tensor]:
    """Losses, gradients and parameters of every step."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), {}
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        for _ in range(micro_batches):
            loss = _in_chunks(model, model(torch.randn(4, 8, generator=generator).to(DEVICE)), sets)
            loss.backward()
        seen[f"loss {step}"] = loss.detach()
        for fqn, parameter in model.named_parameters():
            gradient = torch.zeros(()) if parameter.grad is None else local(parameter.grad).clone()
            seen[f"gradient of {clean(fqn)} {step}"] = gradient
        optimizer.step()
        optimizer.zero_grad()
    return seen | {clean(fqn): local(parameter).detach() for fqn, parameter in model.named_parameters()}


def backwards_inside_the_loss(how: str, folder: str) -> tuple[float, str]:
    """how: under sp.auto "with" the setters around the chunks or "without", "with_twice" in two micro-batches a
    step, or by a "planned" step that must not deviate. The way "planned_in_root": the head is no unit, so that no hook
    runs in the backwards of the chunks. The way "flat": under FSDP1."""
    if how.startswith("flat"):
        return _flat(how == "flat_bf16", folder)
    sets, micro_batches = how in ("with", "with_twice"), 2 if how == "with_twice" else 1
    theirs = _trained(_marked(fully_shard, fully_shard, head=how != "planned_in_root"), sets, micro_batches)
    if how.startswith("planned"):
        plan = _plan(pathlib.Path(folder), modules=("layers.*",) if how == "planned_in_root" else ("layers.*", "head"))
        return largest_difference(
            _trained(_marked(lambda layer: None, lambda model: sp.apply(model, plan)), sets=False), theirs
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps on demand
        model = _marked(sp.unit, lambda model: sp.auto(model, plans=None, quiet=True, optimizer="sgd"))
        ours = _trained(model, sets, micro_batches)
    if deviation := applied_to(model).runtime.deviation:  # the last steps follow a plan
        raise RuntimeError(deviation)
    return largest_difference(ours, theirs)


def _flat(in_bf16: bool, folder: str) -> tuple[float, str]:
    """By a plan and under FSDP1. In bf16 its hook is on the first chunk's gradient alone: the others' are not reduced,
    and the plan carries that."""
    precision = MixedPrecision(param_dtype=torch.bfloat16) if in_bf16 else None

    def wrapped(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            module, use_orig_params=True, mixed_precision=precision, device_id=torch.device(DEVICE)
        )

    torch.manual_seed(2)
    theirs = Body().to(DEVICE)
    for index, layer in enumerate(theirs.layers):
        theirs.layers[index] = wrapped(layer)
    theirs.head = wrapped(theirs.head)
    theirs = wrapped(theirs)
    plan = _plan(
        pathlib.Path(folder),
        "--policy",
        "fsdp1",
        "--use-orig-params",
        *(["--param-dtype", "bfloat16"] if in_bf16 else []),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the fault that the plan carries
        ours = _marked(lambda layer: None, lambda model: sp.apply(model, plan))
    return largest_difference(_trained(ours, sets=False), _trained(theirs, sets=False))


LOSSES = ("with", "with_twice", "without", "planned", "planned_in_root", "flat", "flat_bf16")
