"""A job of real FSDP2 on 2 ranks saves; FSDP1 and FSDP2 on 3 ranks, and one process, load what `shardplan reshard-checkpoint` made of it, and the reverse.

    torchrun --nproc-per-node 3 jobs.py save|load fsdp1|fsdp2 FOLDER WHOLE.pt
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 11), nn.Linear(11, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def make(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 9)
    model = nn.Sequential(nn.Linear(7, 5), Block(), Block(), nn.Linear(5, 1))
    if kind == "fsdp1":
        model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, sync_module_states=True, device_id=torch.device("cpu"))
    else:
        for block in (model[1], model[2], model):
            fully_shard(block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(4, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {"model": state[0], "optimizer": state[1]}


def main(action: str, kind: str, folder: str, path: str) -> None:
    dist.init_process_group("gloo")
    model, optimizer = make(kind)
    if action == "save":
        state = get_state_dict(model, optimizer)
        dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=folder)
    else:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    state = whole(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
