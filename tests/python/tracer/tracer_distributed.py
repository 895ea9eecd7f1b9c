# SPDX-License-Identifier: Apache-2.0
"""Builders of distributed models, as rank 0 of a fake process group sees them. Each is traced in a process of its
own: a process group and DTensor's caches outlive a model."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

TP = 4


def join(ranks=TP):
    """A builder that reads values runs twice."""
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    """The head is on every rank whole."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def whole(batch):
    return Blocks(), torch.zeros(batch, 16)


def tensor_parallel(batch):
    join()
    model = Blocks()
    mesh = init_device_mesh("cuda", (TP,), mesh_dim_names=("tp",))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, torch.zeros(batch, 16)


def titan(tp, backend, batch, seq):
    """torchtitan's llama3 debug model, cut by its own `parallelize`, and its loss."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims, spmd_types
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    set_spmd_backend(backend)
    config = llama3_configs["debugmodel"]("flex")
    for layer in config.layers:  # flex attention is compiled
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    set_llama3_sharding_config(config, enable_sp=True)
    with torch.device("meta"):
        model = config.build()
    if tp > 1:
        join(tp)
        parallelism = ParallelismConfig(tensor_parallel_degree=tp, spmd_backend=backend)
        dims = ParallelDims.from_config(parallelism, tp)
        dims.build_mesh()
        model.parallelize(dims)
    labels = torch.zeros(batch, seq, dtype=torch.long, device="cuda")

    def loss(output):
        if tp == 1 or backend != "spmd_types":
            return cross_entropy_loss(output, labels)
        with spmd_types.set_current_spmd_mesh(dims.spmd_dense_mesh()):
            return cross_entropy_loss(output, labels, global_vocab_size=config.vocab_size)

    return model, torch.zeros(batch, seq, dtype=torch.long), loss


def titan_whole(batch, seq):
    return titan(1, "partial_dtensor", batch, seq)


def titan_dtensor(batch, seq):
    return titan(TP, "partial_dtensor", batch, seq)


def titan_spmd_types(batch, seq):
    return titan(TP, "spmd_types", batch, seq)
