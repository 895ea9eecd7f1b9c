# SPDX-License-Identifier: Apache-2.0
"""Rank 0 sends to rank 2, which ends before its step."""

import os

import torch
import torch.distributed as dist

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
if dist.get_rank() == 2:
    raise RuntimeError("this stage has no data")
model = torch.nn.Linear(64, 64, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
output = model(torch.ones(4, 64, device=device))
dist.send(output.detach(), 2)
output.sum().backward()
optimizer.step()
dist.destroy_process_group()
