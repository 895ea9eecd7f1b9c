# SPDX-License-Identifier: Apache-2.0
"""The same script under FSDP2 and by a plan: torchrun --nproc-per-node 2 train.py [--plan]."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import Transformer
from parallelize import apply_ac, apply_compile, apply_fsdp, prefetch
from torch.distributed.fsdp import fully_shard


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--accumulate", type=int, default=2)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = dist.device_mesh.init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    torch.manual_seed(0)
    model = Transformer().to(device)
    apply_ac(model)
    apply_compile(model)
    if arguments.plan:
        import shardplan.torch as sp

        apply_fsdp(model, mesh, sp.unit)  # the two lines
        model = sp.auto(model, quiet=True)  # that a port takes
    else:
        apply_fsdp(model, mesh, fully_shard)
    prefetch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(arguments.steps):
        total = 0.0
        for microbatch in range(arguments.accumulate):
            last = microbatch == arguments.accumulate - 1
            model.set_requires_gradient_sync(last)
            generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + dist.get_rank())
            tokens = torch.randint(97, (2, 17), generator=generator).to(device)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) / arguments.accumulate
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total:.6f}, gradient norm {norm.item():.6f}")


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    main()
    dist.destroy_process_group()
