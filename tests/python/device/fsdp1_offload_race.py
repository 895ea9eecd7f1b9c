# SPDX-License-Identifier: Apache-2.0
"""Whether real FSDP1 races when parameters are offloaded and a forward comes between the backward and the optimizer's
step: `fsdp1_offload_race.py` on the device in software (docs/internals/device.md) prints what such forwards return,
without and with a synchronize before the step.

A forward copies the shards from pinned host memory without blocking. Behind a backward FSDP1 waits for its copies to
the host; behind a forward it waits for nothing, so the optimizer may change a shard before it has been copied. On the
device in `inline` mode every copy is done at once; in `lazy` mode it is as late as nobody waits for it.
"""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel

RANKS = 2
STEPS = 2


def _train(rank: int, synchronize: bool) -> list[float]:
    """Sums of what the forwards before the optimizer's steps return."""
    torch.manual_seed(0)
    device = torch.device("cuda", rank)
    layers = [
        FullyShardedDataParallel(nn.Linear(64, 64), cpu_offload=CPUOffload(True), device_id=device) for _ in range(3)
    ]
    model = FullyShardedDataParallel(nn.Sequential(*layers), cpu_offload=CPUOffload(True), device_id=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(4, 64, device=device)
    seen = []
    for _ in range(STEPS):
        model(x).square().mean().backward()
        with torch.no_grad():
            evaluated = model(x)
        if synchronize:
            torch.cuda.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(round(evaluated.sum().item(), 4))
    return seen


def _rank(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_HOSTID=f"shardplan-{rank}")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=RANKS)
    right, found = _train(rank, True), _train(rank, False)
    if rank == 0:
        print(
            f"with a synchronize {right}, without {found}: {'no race is seen' if right == found else 'FSDP1 races'}",
            flush=True,
        )
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    mp.spawn(_rank, (free,), nprocs=RANKS)
