# SPDX-License-Identifier: Apache-2.0
"""Four CPU ranks under FSDP2 whose model has collectives of its own among pairs of ranks: all_to_alls as between
experts, a gather, a group of a send and a receive, and a sum. Their loop has one more, which no trace sees."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

RANKS, PAIR, WIDTH, TOKENS, STEPS = 4, 2, 32, 16, 2
SCALARS = 3  # of the loop's broadcast


def _pairs():
    return init_device_mesh("cpu", (RANKS // PAIR, PAIR), mesh_dim_names=("dp", "ep"))["ep"].get_group()


class Experts(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.up, self.expert, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        sent = functional.all_to_all_single_autograd(self.up(x), None, None, self.group)
        back = functional.all_to_all_single_autograd(torch.relu(self.expert(sent)), None, None, self.group)
        return x + self.down(back)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.group = _pairs()
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


def traced(batch):
    """For `shardplan trace profiled_experts:traced`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    return Model(), torch.zeros(batch, WIDTH)


def record(folder: str) -> None:
    """On a rank: writes rankN.json.gz, STEPS steps after a warm one."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = Model()
    for module in (*model.layers, model):
        fully_shard(module)
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
