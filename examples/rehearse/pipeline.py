# SPDX-License-Identifier: Apache-2.0
"""A pipeline of stages that are alike, 1F1B, each sharded over its ranks with FSDP2.

    torchrun --nproc_per_node 8 pipeline.py STAGES MICRO_BATCHES
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WIDTH, LAYERS, LENGTH = 2048, 2, 4096
stages, micro_batches = map(int, sys.argv[1:])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
shards = dist.get_world_size() // stages
mesh = init_device_mesh("cuda", (stages, shards), mesh_dim_names=("pp", "dp_shard"))
place = mesh["pp"].get_local_rank()
with device:
    model = nn.Sequential(
        *[nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, 0.0, batch_first=True) for _ in range(LAYERS)]
    ).to(torch.bfloat16)
for layer in model:
    fully_shard(layer, mesh=mesh["dp_shard"], reshard_after_forward=False)
fully_shard(model, mesh=mesh["dp_shard"], reshard_after_forward=False)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
example = torch.empty(1, LENGTH, WIDTH, dtype=torch.bfloat16, device=device)
inner = example.clone().requires_grad_()  # between two stages
stage = PipelineStage(
    model, place, stages, device, group=mesh["pp"].get_group(), input_args=(inner if place > 0 else example,),
    output_args=(inner,),
)  # fmt: skip
schedule = Schedule1F1B(stage, micro_batches, loss_fn=lambda output, target: (output - target).float().square().mean())
batch = torch.randn(micro_batches, LENGTH, WIDTH, dtype=torch.bfloat16, device=device)
for _ in range(3):
    schedule.step(*([batch] if place == 0 else []), **({"target": batch} if place == stages - 1 else {}))
    optimizer.step()
    optimizer.zero_grad()
