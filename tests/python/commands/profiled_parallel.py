# SPDX-License-Identifier: Apache-2.0
"""Four CPU ranks under FSDP2 whose models have collectives of their own among pairs of ranks. One has all_to_alls as
between experts, a gather, a group of a send and a receive, and a sum; the other tensor parallelism by DTensor. Their
loop has one more, which no trace sees."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS, PAIR, WIDTH, TOKENS, STEPS = 4, 2, 32, 16, 2
SCALARS = 3  # of the loop's broadcast


def _mesh(inner):
    return init_device_mesh("cpu", (RANKS // PAIR, PAIR), mesh_dim_names=("dp", inner))


class Experts(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.up, self.expert, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        sent = functional.all_to_all_single_autograd(self.up(x), None, None, self.group)
        back = functional.all_to_all_single_autograd(torch.relu(self.expert(sent)), None, None, self.group)
        return x + self.down(back)


class ExpertParallel(nn.Module):
    def __init__(self):
        super().__init__()
        self.group = _mesh("ep")["ep"].get_group()
        self.layers = nn.ModuleList(Experts(self.group) for _ in range(2))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        self._exchange(x.detach())
        return self.head(x)

    def _exchange(self, x):
        received, rank = torch.empty_like(x), dist.get_rank(self.group)
        ways = (dist.isend, x, rank + 1), (dist.irecv, received, rank - 1)
        batch = [dist.P2POp(way, tensor, group=self.group, group_peer=peer % PAIR) for way, tensor, peer in ways]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        mean = functional.all_gather_tensor(received, 0, self.group).mean()
        dist.all_reduce(mean, group=self.group)


class Columns(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class TensorParallel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Columns() for _ in range(2))
        self.head = nn.Linear(WIDTH, 8)
        for layer in self.layers:
            parallelize_module(layer, _mesh("tp")["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MODELS = {"expert_parallel": ExpertParallel, "tensor_parallel": TensorParallel}


def _traced(name, batch):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    return MODELS[name](), torch.zeros(batch, WIDTH)


def expert_parallel(batch):
    """For `shardplan trace profiled_parallel:expert_parallel`."""
    return _traced("expert_parallel", batch)


def tensor_parallel(batch):
    return _traced("tensor_parallel", batch)


def record(folder: str) -> None:
    """On a rank: writes NAME/rankN.json.gz of each model."""
    for name in MODELS:
        _record(name, f"{folder}/{name}")


def _record(name: str, folder: str) -> None:
    """STEPS steps after a warm one."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = MODELS[name]()
    for module in (*model.layers, model):
        fully_shard(module, mesh=_mesh("tp")["dp"] if name == "tensor_parallel" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    profiler = torch.profiler
    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU],
        record_shapes=True,
        schedule=profiler.schedule(wait=0, warmup=1, active=STEPS),
        on_trace_ready=lambda made: made.export_chrome_trace(f"{folder}/rank{dist.get_rank()}.json.gz"),
    ) as running:
        for _ in range(1 + STEPS):
            model(torch.randn(TOKENS, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.broadcast(torch.zeros(SCALARS), 0)
            running.step()
