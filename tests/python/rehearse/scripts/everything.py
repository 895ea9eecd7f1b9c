# SPDX-License-Identifier: Apache-2.0
"""FSDP2 on a mesh of two dimensions, with what real scripts do beside it: Gloo, objects, barriers, a data loader's
workers, a checkpoint, a handler of SIGTERM. Prints one line for each."""

import os
import signal
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FOLDER = sys.argv[1]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def groups(device: torch.device) -> None:
    ranks = [dist.get_rank(), (dist.get_rank() + 1) % dist.get_world_size()]
    gloo = dist.new_group(sorted(ranks), backend="gloo")
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=gloo)
    dist.monitored_barrier(group=gloo)
    dist.barrier()
    print("gloo", tensor.tolist(), dist.get_backend(gloo), dist.get_world_size(gloo))
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, {"tokens": 7})
    print("gathered", len(objects), objects[0] == objects[-1] == {"tokens": 7})
    told = [f"from {dist.get_rank()}"]
    dist.broadcast_object_list(told, src=0, device=device)
    print("told", told[0])


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM"))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    mesh = init_device_mesh("cuda", (8, 8), mesh_dim_names=("replicate", "shard"))
    print("mesh", [(name, mesh.get_group(name).rank(), mesh.get_group(name).size()) for name in mesh.mesh_dim_names])
    groups(device)
    model = nn.Sequential(*[Block(512) for _ in range(3)]).to(device)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.DataLoader(torch.randn(64, 512), batch_size=8, num_workers=2)
    for step, batch in enumerate(data):
        if step == 1:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            model(batch.to(device)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dcp.save({"model": model.state_dict()}, checkpoint_id=os.path.join(FOLDER, "checkpoint"))
        print(
            "most",
            step,
            torch.cuda.max_memory_allocated(),
            torch.cuda.memory_stats()["allocated_bytes.all.peak"],
            flush=True,
        )


if __name__ == "__main__":
    main()
