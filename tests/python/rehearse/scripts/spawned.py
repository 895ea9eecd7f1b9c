# SPDX-License-Identifier: Apache-2.0
"""Processes of torch.multiprocessing.spawn, stores, two optimizers, big files; then out of memory in the module `1`."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

FOLDER = sys.argv[1]


def train(rank: int, world: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    dist.init_process_group("nccl", rank=rank, world_size=world)
    torch.cuda.set_device(rank)
    store = dist.TCPStore("localhost", 12356, world, rank == 0)
    store.set(f"address/{rank}", "here")
    print("store", store.get(f"address/{(rank + 1) % world}"), isinstance(store, dist.Store))
    try:
        store.get("what nobody sets")
    except RuntimeError as error:
        print("store", str(error)[:80])
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024)).to(rank)
    optimizers = [torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[1].parameters(), lr=0.1)]
    torch.save(model.state_dict(), os.path.join(FOLDER, "small.pt"))
    torch.save({"big": torch.empty(1 << 23)}, os.path.join(FOLDER, "big.pt"))
    for batch in (64, 64, 1 << 22):
        model(torch.randn(batch, 1024, device=rank)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    count = torch.cuda.device_count()
    print("devices", count)
    mp.spawn(train, args=(count,), nprocs=count)
