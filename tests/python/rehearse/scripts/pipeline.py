# SPDX-License-Identifier: Apache-2.0
"""A pipeline, a stage on each rank, whose shapes travel from stage to stage as objects."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
width = 256
model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)).to(device)
schedule = ScheduleGPipe(
    PipelineStage(model, rank, world, device), 2, loss_fn=lambda output, target: (output - target).square().mean()
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    schedule.step(
        *([torch.randn(8, width, device=device)] if rank == 0 else []),
        **({"target": torch.randn(8, width, device=device)} if rank == world - 1 else {}),
    )
    optimizer.step()
    optimizer.zero_grad()
print("stage", rank, "of", world)
