# SPDX-License-Identifier: Apache-2.0
"""Builders that call fully_shard themselves, in front of the tracer and with PyTorch's own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

RANKS = 8
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def mesh(*dims):
    """(name, size) of each; in front of the tracer there is a GPU."""
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, tuple(size for _, size in dims), mesh_dim_names=tuple(name for name, _ in dims))


def shard(model, **arguments):
    """Units of torchtitan's decoders."""
    fully_shard(model.embedding, **arguments)
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=True, **arguments)
    fully_shard([model.norm, model.head], reshard_after_forward=False, **arguments)
    fully_shard(model, **arguments)


def plain():
    model = Model()
    shard(model, mesh=mesh(("dp", RANKS)))
    return model


def reading():
    """It is called twice: the second time on tensors with values."""
    model = plain()
    assert torch.ones(2).nonzero().numel() == 2
    return model


def without_mesh():
    mesh(("dp", RANKS))
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def without_root():
    model, whole = Model(), mesh(("dp", RANKS))
    for layer in model.layers:
        fully_shard(layer, mesh=whole)
    return model


def hybrid():
    model = Model()
    shard(model, mesh=mesh(("replicas", 2), ("shards", 4)), mp_policy=MIXED)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    blocks = list(model.layers)
    for block, following in zip(blocks, blocks[1:]):
        block.set_modules_to_forward_prefetch([following])
    blocks[-1].set_modules_to_forward_prefetch([model.norm, model.head])
    model.head.set_modules_to_backward_prefetch([blocks[-1]])
    return model


def nested():
    """A unit in a unit, on a mesh of its own; another dtype; a parameter that is left alone."""
    model, whole = Model(), mesh(("dp", 4), ("ep", 2))
    for layer in model.layers:
        fully_shard(layer.up, mesh=whole["dp"], offload_policy=CPUOffloadPolicy(pin_memory=False))
        fully_shard(layer, mesh=whole["dp"], mp_policy=MIXED, reshard_after_forward=2)
    fully_shard(model, mesh=whole["dp"], ignored_params={model.norm.bias})
    return model


def placed():
    """shard_placement_fn by parameter."""
    model, whole = Model(), mesh(("dp", RANKS))
    for layer in model.layers:
        inside = set(layer.down.parameters())
        fully_shard(layer, mesh=whole, shard_placement_fn=lambda p, own=inside: Shard(1) if p in own and p.dim() > 1
                    else None)
    fully_shard(model, mesh=whole)
    return model


def on_meshes():
    """ShardPlacementResult: some parameters of a unit are on another mesh of the same ranks."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    model, whole = Model(), mesh(("dp", 4), ("ep", 2))
    everything = whole._flatten("everything")
    some, every = FSDPMeshInfo(whole["dp"], shard_mesh_dim=0), FSDPMeshInfo(everything, shard_mesh_dim=0)
    for layer in model.layers:
        inside = set(layer.down.parameters())
        fully_shard(
            layer, mesh=everything,
            shard_placement_fn=lambda p, own=inside: ShardPlacementResult(Shard(0), some if p in own else every),
        )
    fully_shard(model, mesh=everything)
    return model


def tensor_parallel():
    model, whole = Model(), mesh(("dp", 4), ("tp", 2))
    for layer in model.layers:
        parallelize_module(layer, whole["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard(model, mesh=whole["dp"], mp_policy=MIXED)
    return model


def checkpointed():
    model = Model()
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer, early_stop=False)
    shard(model, mesh=mesh(("dp", RANKS)))
    return model


def _contexts(keeps):
    """keeps: whether the product that is the so many-th is kept."""
    def contexts():
        counts = {True: 0, False: 0}

        def policy(context, operator, *arguments, **more):
            if operator is not torch.ops.aten.addmm.default:
                return CheckpointPolicy.PREFER_RECOMPUTE
            counts[context.is_recompute] += 1
            kept = keeps(counts[context.is_recompute], arguments)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


def selective(keeps=lambda count, arguments: count % 2 > 0):
    model = Model()
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer, context_fn=_contexts(keeps))
    shard(model, mesh=mesh(("dp", RANKS)))
    return model


def by_shape():
    """Selective by the shape of an argument, which no strategy says."""
    return selective(lambda count, arguments: arguments[2].shape[0] == 16)


def chunked():
    """A loss that runs the head on parts, and keeps it unsharded meanwhile (torchtitan's ChunkedLossWrapper)."""
    model = Model()
    shard(model, mesh=mesh(("dp", RANKS)), mp_policy=MIXED)
    head = model.head
    model.forward = lambda tokens: _hidden(model, tokens)

    def loss(hidden):
        head.set_reshard_after_forward(False)
        head.set_requires_gradient_sync(False, recurse=False)
        head.unshard()
        parts = [part.detach().requires_grad_() for part in hidden.split(hidden.shape[1] // 2, dim=1)]
        for index, part in enumerate(parts):
            if index == 1:
                head.set_requires_gradient_sync(True, recurse=False)
            head(part).float().sum().backward()
        head.reshard()
        return (hidden * torch.cat([part.grad for part in parts], dim=1)).sum()

    return model, (torch.zeros(2, 16, dtype=torch.long),), loss


def _hidden(model, tokens):
    x = model.embedding(tokens)
    for layer in model.layers:
        x = layer(x)
    return model.norm(x)


def hooked():
    """A setter that no strategy has."""
    model = plain()
    model.set_all_reduce_hook(lambda tensor: None)
    return model


def unsharded():
    return Model()
