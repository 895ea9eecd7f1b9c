# SPDX-License-Identifier: Apache-2.0
"""Saves over files of a real training and loads what it saved, profiles the device, and scatters objects by keyword:
keeps.py FOLDER."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

folder = sys.argv[1]
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = torch.nn.Linear(4096, 4096).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    model(torch.randn(8, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/runs/{step}")
    dcp.load({"model": model.state_dict()}, checkpoint_id=f"{folder}/runs/{step}")
    torch.save(model.state_dict(), f"{folder}/large.pt")
    torch.save(torch.zeros(10), f"{folder}/small.pt")
    torch.save(torch.zeros(10), f"{folder}/new.pt")
print("loaded", torch.load(f"{folder}/new.pt").shape)
part = [None]
dist.scatter_object_list(
    scatter_object_output_list=part, scatter_object_input_list=list(range(dist.get_world_size())), src=0
)
with torch.profiler.profile(
    activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
) as profile:
    model(torch.randn(8, 4096, device="cuda"))
print("part", part, "profiled", len(profile.key_averages()) > 0)
