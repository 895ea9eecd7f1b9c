# SPDX-License-Identifier: Apache-2.0
"""Jobs of real FSDP1 and FSDP2 that train, save and load.

    jobs.py RANK RANKS STORE (save|load) FOLDER (fsdp1|fsdp2)=NAME...

STORE is a file where the ranks meet. Each job trains a model of its own and saves it to FOLDER/NAME; or loads
FOLDER/NAME, and saves what it has then to FOLDER/NAME_again.
"""

import os
import pathlib
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from states import load_distributed
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    FullOptimStateDictConfig, FullStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 11), nn.Linear(11, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def make(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(len(kind))
    model = nn.Sequential(nn.Linear(7, 5), Block(), Block(), nn.Linear(5, 8))
    if kind == "fsdp1":
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu")
        )
    else:
        for block in (model[1], model[2], model):
            fully_shard(block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(4, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def load_fsdp1(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, folder: pathlib.Path) -> None:
    """From the whole state, which every rank reads."""
    state = load_distributed(folder, folder.with_name(f"{folder.name}.{dist.get_rank()}.pt"))
    config = FullStateDictConfig(), FullOptimStateDictConfig()
    with (
        warnings.catch_warnings(),
        FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *config),
    ):
        warnings.simplefilter("ignore")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(
            FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state["optimizer"])
        )


def run(action: str, kind: str, folder: pathlib.Path) -> None:
    model, optimizer = make(kind)
    if action == "save":
        dcp.save(state_of(model, optimizer), checkpoint_id=folder)
        return
    if kind == "fsdp1":
        load_fsdp1(model, optimizer, folder)
    else:
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    dcp.save(state_of(model, optimizer), checkpoint_id=folder.with_name(f"{folder.name}_again"))


if __name__ == "__main__":
    rank, ranks, store, action, folder, *of_jobs = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks))
    for job in of_jobs:
        kind, name = job.split("=")
        run(action, kind, pathlib.Path(folder) / name)
    dist.barrier()
    os._exit(0)  # FSDP1's threads may abort an interpreter that ends
