# SPDX-License-Identifier: Apache-2.0
"""Before the first collective all ranks find out whether they are about to train the same model by the same plan."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .arguments import PlanError, ranks_of
from .native import native
from .peers import peers
from .store import next_store


def model_signature(model: nn.Module) -> str:
    """A digest of the names, shapes, dtypes, ties and placements of parameters and buffers; not of devices and
    values."""
    lines = []
    seen: dict[int, int] = {}

    def add(kind: str, name: str, tensor: torch.Tensor) -> None:
        placements = str(tensor.placements) if isinstance(tensor, DTensor) else ""
        tie = seen.setdefault(id(tensor), len(seen))
        lines.append(f"{kind} {name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad} {placements} {tie}")

    for name, parameter in model.named_parameters(remove_duplicate=False):
        add("parameter", name, parameter)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        add("buffer", name, buffer)
    return "sha256:" + hashlib.sha256("\n".join(lines).encode()).hexdigest()


def agree(model: nn.Module, plan, mesh: DeviceMesh | None, timeout_s: float, failure: str = "") -> None:
    """Collective, through the default group's store. Raises PlanError on all ranks, naming those that differ, or those
    that do not come within the timeout.

    plan: None where there is a failure, which the other ranks are told.
    """
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return
    ranks = ranks_of(mesh)
    if dist.get_rank() not in ranks or len(ranks) < 2:
        return
    store = next_store("agree", ranks, timeout_s)
    facts = []
    if plan is not None and not failure:
        facts = [
            ("the plan", plan.digest),
            ("shardplan's version", native.__version__),
            ("the model (names, shapes and dtypes of its parameters and buffers)", model_signature(model)),
        ]
    watched = peers()
    try:
        native.agree(store, ranks.index(dist.get_rank()), ranks, facts, failure, timeout_s, watched)
    except RuntimeError as error:
        if watched.dead():
            watched.fail()
        raise PlanError(str(error)) from None
