# SPDX-License-Identifier: Apache-2.0
"""torchtitan's order: activation checkpointing, compilation, sharding. `shard` is fully_shard or
shardplan.torch.unit."""

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy


def apply_ac(model: nn.Module) -> None:
    for name, block in model.layers.named_children():
        model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False))


def apply_compile(model: nn.Module) -> None:
    for name, block in model.layers.named_children():
        model.layers.register_module(name, torch.compile(block, fullgraph=True, backend="aot_eager"))


def apply_fsdp(model: nn.Module, mesh, shard) -> None:
    low = torch.bfloat16 if mesh.device_type == "cuda" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    shard(model.tok_embeddings, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for block in model.layers.values():
        shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    shard([model.norm, model.output], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    shard(model, mesh=mesh, mp_policy=policy)


def prefetch(model: nn.Module) -> None:
    """Each block gathers the next one early, as in torchtitan."""
    blocks = list(model.layers.values())
    model.tok_embeddings.set_modules_to_forward_prefetch([blocks[0]])
    for block, following in zip(blocks, blocks[1:]):
        block.set_modules_to_forward_prefetch([following])
    for block, before in zip(reversed(blocks), list(reversed(blocks))[1:]):
        block.set_modules_to_backward_prefetch([before])
