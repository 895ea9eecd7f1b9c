# SPDX-License-Identifier: Apache-2.0
"""Functions that run on the ranks in test_adapter_saved_states.py: checkpoints that one job writes and another
loads."""

from __future__ import annotations

import contextlib
from pathlib import Path

import shardplan.torch as sp
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from equivalence import Case, make_mesh, make_model
from flat_user import loss
from shardplan.torch._checkpoints import save as saving
from optim_states import _optimizer, _train, same
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict,
)
from torch.distributed.fsdp import fully_shard


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    of_model = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    state = sp.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    return {"model": {k: v.detach().cpu() for k, v in of_model.items()}, "state": state}


@contextlib.contextmanager
def _loses_elements(rank: int):
    """That rank's thread finds tensors shorter than they were said to be."""
    whole = saving._held

    def shorter(name, value):
        tensor, box = whole(name, value)
        return tensor.flatten()[:-1] if tensor.dim() > 0 else tensor, box

    if dist.get_rank() == rank:
        saving._held = shorter
    try:
        yield
    finally:
        saving._held = whole


def _said(function, *arguments, **options) -> str:
    try:
        function(*arguments, **options)
    except RuntimeError as error:
        return str(error)
    return ""


def write(case: Case, plan: str, folder: str) -> dict[str, bool]:
    """Saves at once and in the background, training on; leaves what a job that loads has to find."""
    undisturbed = sp.apply(make_model(case), plan, make_mesh(case))
    its_optimizer = _optimizer(undisturbed)
    _train(case, undisturbed, its_optimizer, range(4))
    model = sp.apply(make_model(case), plan, make_mesh(case))
    optimizer = _optimizer(model)
    _train(case, model, optimizer, range(2))
    sp.save(f"{folder}/now", model, optimizer)
    whole = _whole(model, optimizer)
    saving = sp.save(f"{folder}/later", model, optimizer, asynchronous=True)
    _train(case, model, optimizer, range(2, 3))
    saving.wait()
    saving.wait()  # nothing is left to do
    cost = saving.cost()
    if dist.get_rank() == 0:
        torch.save(whole, f"{folder}/whole.pt")
    results = {
        "nothing beside": sorted(p.name for p in Path(folder).iterdir() if p.is_dir()) == ["later", "now"],
        "done": saving.done(),
    }
    results["cost"] = (
        cost["bytes"] > 0
        and 0 < cost["held_s"]
        and 0 < cost["saved_s"]
        and cost["steps"] <= 1
        and cost["held_s_per_step"] == cost["held_s"]
    )
    results["there already"] = "now: it is there already, and nothing is overwritten" in _said(
        sp.save, f"{folder}/now", model, optimizer
    )
    results["not there"] = "never: cannot open the file for reading: No such file or directory" in _said(
        sp.load, f"{folder}/never", model, optimizer
    )
    results |= _failures(folder, model, optimizer)
    _train(case, model, optimizer, range(3, 4))
    results["training is undisturbed"] = same(_whole(model, optimizer), _whole(undisturbed, its_optimizer))
    apart = f"{folder}/of_rank_{dist.get_rank()}"
    results["other folders"] = "the checkpoint that is to be written differs: " in _said(
        sp.save, apart, model, optimizer
    )
    dist.barrier()  # the first rank takes away what was begun
    results["no part of it"] = not list(Path(folder).glob(".*of_rank*"))
    plain, again = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.25, 0.5))
    sp.save(f"{folder}/plain", model, plain)
    sp.load(f"{folder}/plain", model, again)
    results["no state"] = again.param_groups[0]["lr"] == 0.25
    return results


def _failures(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bool]:
    """A background save that one rank cannot write: all are told by wait, or by the next save, and the old checkpoint
    stays."""
    results = {}
    before = {path.name: path.stat().st_mtime_ns for path in Path(f"{folder}/now").iterdir()}
    with _loses_elements(1):
        saving = sp.save(f"{folder}/now", model, optimizer, asynchronous=True, replace=True)
        results["wait says it"] = "bytes is given as" in _said(saving.wait)
        sp.save(f"{folder}/new", model, optimizer, asynchronous=True)
        results["the next save says it"] = (
            "new: " in (said := _said(sp.save, f"{folder}/other", model, optimizer)) and "bytes is given as" in said
        )
    dist.barrier()  # the first rank takes away what was written
    results["nothing new"] = sorted(p.name for p in Path(folder).iterdir() if p.is_dir()) == ["later", "now"]
    results["the old one stays"] = before == {
        path.name: path.stat().st_mtime_ns for path in Path(f"{folder}/now").iterdir()
    }
    return results


def read(case: Case, plan: str, folder: str) -> dict[str, bool]:
    """Another job loads both, and real FSDP2 does."""
    expected = torch.load(f"{folder}/whole.pt", weights_only=True)
    results = {}
    for name in ("now", "later"):
        model = sp.apply(make_model(case), plan, make_mesh(case))
        optimizer = _optimizer(model)
        loss(case, model, 9).backward()
        optimizer.step()
        optimizer.zero_grad()
        sp.load(f"{folder}/{name}", model, optimizer)
        results[name] = same(_whole(model, optimizer), expected)
    results["a model that has more"] = _with_more(folder)
    theirs = fully_shard(make_model(case), mesh=make_mesh(case))
    of_theirs = _optimizer(theirs)
    state = dict(zip(("model", "optimizer"), get_state_dict(theirs, of_theirs)))
    dcp.load(state, checkpoint_id=f"{folder}/now")
    set_state_dict(theirs, of_theirs, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    results["FSDP2"] = same(_whole(theirs, of_theirs), expected)
    return results


def _with_more(folder: str) -> bool:
    """A module that the checkpoint has not: refused by name, or left as it is."""
    model = nn.ModuleDict({"extra": nn.Linear(3, 2)})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    refused = _said(sp.load, f"{folder}/now", model)
    sp.load(f"{folder}/now", model, strict=False)
    return "has no model.extra.weight and 1 more" in refused and same(dict(model.state_dict()), before)
