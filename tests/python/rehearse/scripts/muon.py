# SPDX-License-Identifier: Apache-2.0
"""Two steps of torch.optim.Muon on FSDP2's parameters. Arguments: dtype, replicas and, from there on, the matrices
(6x4)."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dtype, replicas = getattr(torch, sys.argv[1]), int(sys.argv[2])
shapes = [tuple(map(int, word.split("x"))) for word in sys.argv[3:]]
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
sizes = (replicas, dist.get_world_size() // replicas) if replicas > 1 else (dist.get_world_size(),)
mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
layers = nn.ModuleList(nn.Linear(columns, rows, bias=False, dtype=dtype) for rows, columns in shapes)
for layer in layers:
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.Muon(layers.parameters())
for _ in range(2):
    for layer in layers:
        layer(torch.ones(2, layer.in_features, dtype=dtype, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
