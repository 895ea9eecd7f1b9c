# SPDX-License-Identifier: Apache-2.0
"""The result of an asynchronous collective is read before it is waited for.

    shardplan rehearse --gpus 8 --races -- torchrun --nproc_per_node 8 collective_not_awaited.py [mended]
"""

import sys

import torch
import torch.distributed as dist

mended = "mended" in sys.argv
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_node_local_rank())
gradient = torch.ones(1 << 20, device="cuda")
for _ in range(3):
    work = dist.all_reduce(gradient, async_op=True)
    if mended:
        work.wait()
    gradient.clamp_(max=1.0)
    work.wait()
if dist.get_rank() == 0:
    print("gradient", gradient.sum().item())
dist.destroy_process_group()
