# SPDX-License-Identifier: Apache-2.0
"""Llama 8B with PyTorch's FSDP2 alone: fully_shard, mixed precision, recomputation.

    torchrun --nproc_per_node 8 fsdp2.py [--batch 1] [--optimizer adamw|muon] [--compile] [--float8] [--steps 3]
"""

import argparse

import llama
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def optimizers(model: torch.nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    if kind == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)]
    matrices = [
        p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "lm_head" not in name
    ]
    chosen = set(matrices)
    return [
        torch.optim.Muon(matrices, lr=2e-2),
        torch.optim.AdamW((p for p in model.parameters() if p not in chosen), lr=3e-4, fused=True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--float8", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()

    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_node_local_rank())
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    with torch.device("meta"):
        model = llama.model()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if arguments.float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model,
            config=Float8LinearConfig(enable_fsdp_float8_all_gather=True),
            module_filter_fn=lambda _, name: name != "lm_head",
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        if arguments.compile:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")
    model.init_weights()
    chosen = optimizers(model, arguments.optimizer)
    for step in range(arguments.steps):
        ids = llama.tokens(arguments.batch)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(
                f"step {step} loss {loss.item():.3f} peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
