# SPDX-License-Identifier: Apache-2.0
"""A few layers of a Llama with plain FSDP2: llama_fsdp2.py CONFIG.json [--checkpoint] [--hsdp] [--accumulate N]
[--muon]"""

import argparse
import json

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("config")
parser.add_argument("--checkpoint", action="store_true")
parser.add_argument("--hsdp", action="store_true")
parser.add_argument("--muon", action="store_true")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--sequence", type=int, default=4096)
arguments = parser.parse_args()

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_node_local_rank())
world = dist.get_world_size()
shape, names = ((world // 8, 8), ("replicate", "shard")) if arguments.hsdp else ((world,), ("shard",))
mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
with open(arguments.config, encoding="utf-8") as file:
    config = LlamaConfig(**{**json.load(file), "use_cache": False})
with torch.device("meta"):
    model = LlamaForCausalLM._from_config(config, dtype=torch.float32)
if arguments.checkpoint:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
model.to_empty(device="cuda")
matrices = {p for p in model.model.layers.parameters() if p.ndim == 2} if arguments.muon else set()
optimizers = [torch.optim.Muon([p for p in model.parameters() if p in matrices])] if matrices else []
optimizers.append(torch.optim.AdamW([p for p in model.parameters() if p not in matrices], fused=True))
tokens = torch.randint(0, config.vocab_size, (1, arguments.sequence), device="cuda")
for _ in range(3):
    for micro in range(arguments.accumulate):
        model.set_requires_gradient_sync(micro == arguments.accumulate - 1)
        model(input_ids=tokens, labels=tokens).loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
