"""What runs on the ranks in test_adapter_saved_states.py: checkpoints that one job writes and another loads."""

from __future__ import annotations

from pathlib import Path

import shardplan.torch as sp
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from equivalence import Case, make_mesh, make_model
from flat_user import loss
from optim_states import _optimizer, _train, same
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    of_model = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    state = sp.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    return {"model": {k: v.detach().cpu() for k, v in of_model.items()}, "state": state}


def write(case: Case, plan: str, folder: str) -> dict[str, bool]:
    """Saves at once and in the background, training on; leaves what a job that loads has to find."""
    model = sp.apply(make_model(case), plan, make_mesh(case))
    optimizer = _optimizer(model)
    _train(case, model, optimizer, range(2))
    sp.save(f"{folder}/now", model, optimizer)
    whole = _whole(model, optimizer)
    saving = sp.save(f"{folder}/later", model, optimizer, asynchronous=True)
    _train(case, model, optimizer, range(2, 3))
    saving.wait()
    if dist.get_rank() == 0:
        torch.save(whole, f"{folder}/whole.pt")
    results = {"nothing beside": sorted(p.name for p in Path(folder).iterdir() if p.is_dir()) == ["later", "now"], "done": saving.done()}
    try:
        sp.save(f"{folder}/now", model, optimizer)
    except RuntimeError as error:
        results["there already"] = "now exists" in str(error)
    try:
        sp.load(f"{folder}/never", model, optimizer)
    except RuntimeError as error:
        results["not there"] = "no checkpoint of torch.distributed.checkpoint is there" in str(error)
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
    theirs = fully_shard(make_model(case), mesh=make_mesh(case))
    of_theirs = _optimizer(theirs)
    state = dict(zip(("model", "optimizer"), get_state_dict(theirs, of_theirs)))
    dcp.load(state, checkpoint_id=f"{folder}/now")
    set_state_dict(theirs, of_theirs, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    results["FSDP2"] = same(_whole(theirs, of_theirs), expected)
    return results
