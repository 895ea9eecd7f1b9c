# SPDX-License-Identifier: Apache-2.0
"""Races in PyTorch 2.15 that settings.py met, each as a training that is as small as can be:

    shardplan rehearse --gpus 2 --steps 0 --races -- torchrun --nproc_per_node 2 faults.py NAME [--mended]

--mended: what a script can do about it.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, fully_shard

WIDTH = 64
STEPS = 3


def offloaded(mended: bool) -> None:
    """FSDP1 with offload: a forward between backward and step copies parameters to the device, and the step writes them
    on the host meanwhile."""
    model = FullyShardedDataParallel(
        nn.Linear(WIDTH, WIDTH), cpu_offload=CPUOffload(offload_params=True), device_id=torch.cuda.current_device()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, WIDTH, device="cuda")
    for _step in range(STEPS):
        model(x).sum().backward()
        with torch.no_grad():
            model(x)
        if mended:
            torch.cuda.current_stream().synchronize()
        optimizer.step()
        optimizer.zero_grad()


def zeroed(mended: bool) -> None:
    """FSDP1 with use_orig_params and two micro-batches. A parameter has no gradient (here it is frozen): backward
    zeroes its part on a stream that no other one waits for, while the reduced gradients are added."""
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)).cuda() for _ in range(3)]
    for layer in layers:
        layer[0].weight.requires_grad_(mended)
    units = [FullyShardedDataParallel(layer, use_orig_params=True) for layer in layers]
    model = FullyShardedDataParallel(nn.Sequential(*units), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, WIDTH, device="cuda")
    for _step in range(STEPS):
        for _microbatch in range(2):
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def beside(mended: bool) -> None:
    """FSDP2 whose forward is on another stream than the one that calls backward: the gradients of the root are of the
    forward's stream, are copied on the other one, and dropped."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).cuda()
    for layer in model[1:]:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, WIDTH, device="cuda")
    side = torch.cuda.Stream()
    for _step in range(STEPS):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = model(x).sum()
        loss.backward()
        if mended:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.zeros(WIDTH, device="cuda")
        optimizer.step()
        optimizer.zero_grad()


FAULTS = {"offloaded": offloaded, "zeroed": zeroed, "beside": beside}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=FAULTS)
    parser.add_argument("--mended", action="store_true")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    FAULTS[options.name](options.mended)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
