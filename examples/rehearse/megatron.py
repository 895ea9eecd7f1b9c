# SPDX-License-Identifier: Apache-2.0
"""Llama 8B with megatron-fsdp: torchrun --nproc_per_node 8 megatron.py."""

import llama
import torch
import torch.distributed as dist
from megatron_fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


def main() -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_node_local_rank())
    mesh = init_device_mesh("cuda", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    with torch.device("cuda"):
        model = llama.model()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model, optimizer = fully_shard(
        module=model,
        optimizer=optimizer,
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[LlamaDecoderLayer],
        zero_dp_strategy="optim_grads_params",
    )
    for step in range(3):
        ids = llama.tokens(1, 4096)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
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
