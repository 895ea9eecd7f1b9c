# SPDX-License-Identifier: Apache-2.0
"""Two buffers are gathered into in turns, and nothing says that the layer which read one has finished with it.

    shardplan rehearse --gpus 8 --races -- torchrun --nproc_per_node 8 buffer_gathered_into_twice.py [mended]
"""

import sys

import torch
import torch.distributed as dist

mended = "mended" in sys.argv
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_node_local_rank())
world, layers, size = dist.get_world_size(), 6, 1 << 20
pool = torch.empty(2, size, device="cuda")
shards = [torch.full((size // world,), 1.0 + layer, device="cuda") for layer in range(layers)]
state = torch.ones(size, device="cuda")
read = [torch.cuda.Event() for _ in pool]
comm = torch.cuda.Stream()
comm.wait_stream(torch.cuda.current_stream())
for layer, shard in enumerate(shards):
    with torch.cuda.stream(comm):
        if mended:
            read[layer % 2].wait()
        dist.all_gather_into_tensor(pool[layer % 2], shard)
    torch.cuda.current_stream().wait_stream(comm)
    state = state * pool[layer % 2]
    read[layer % 2].record()
if dist.get_rank() == 0:
    print("state", state.sum().item())
dist.destroy_process_group()
