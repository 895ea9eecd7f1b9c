# SPDX-License-Identifier: Apache-2.0
"""sp.save on some ranks and sp.load on others, of models that real FSDP2, HSDP and tensor parallelism have sharded:
buffers, frozen parameters, two optimizers, one of them without a state of every parameter. Run by tools/nightly:

    sessions.py [NUMBER...]     the cases of these numbers, from 0; default: every case
"""

from __future__ import annotations

import copy
import pathlib
import sys
import tempfile
import warnings

import shardplan.torch as sp
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# (ranks and kind that save), (ranks and kind that load) ...
CASES = (
    ((4, "hsdp"), (3, "fsdp"), (1, "whole"), (5, "fsdp")),
    ((4, "tensor_parallel"), (3, "fsdp"), (6, "tensor_parallel")),
    ((3, "fsdp"), (4, "tensor_parallel"), (6, "hsdp")),
    ((1, "whole"), (2, "fsdp")),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 12), nn.Linear(12, 6), nn.BatchNorm1d(6)
        self.odd, self.scale = nn.Linear(6, 5), nn.Parameter(torch.tensor([2.0]))
        self.frozen = nn.Linear(5, 7).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.odd(self.norm(self.down(torch.relu(self.up(x))))) * self.scale)


def _sharded(kind: str, ranks: int) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    mesh = None
    if kind == "tensor_parallel":
        whole = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, whole["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = whole["data"]
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    if kind != "whole":
        for module in (model.up, model):
            fully_shard(module, mesh=mesh)
    return model


def _rank(rank: int, ranks: int, store: str, kind: str, folder: str, saves: bool) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    model = _sharded(kind, ranks)
    rest = [p for name, p in model.named_parameters() if not name.startswith("up") and p.requires_grad]
    optimizers = (torch.optim.AdamW(model.up.parameters(), lr=0.01), torch.optim.SGD(rest, lr=0.1, momentum=0.9))

    def step(number: int) -> None:
        torch.manual_seed(number)
        model(torch.randn(8, 6)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def whole() -> tuple:
        return copy.deepcopy(
            get_state_dict(model, optimizers, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        )

    for number in range(3 if saves else 1):
        step(number)
    if saves:
        saving = sp.save(folder, model, optimizers, asynchronous=True)
        expected = whole()
        step(3)
        if kind != "hsdp":  # or the end of the process does it
            saving.wait()
        if rank == 0:
            torch.save(expected, f"{folder}.pt")
    else:
        sp.load(folder, model, optimizers)
        found = whole()
        if rank == 0:
            _compare(found, torch.load(f"{folder}.pt", weights_only=True))
    dist.barrier()
    dist.destroy_process_group()


def _compare(found: tuple, expected: tuple) -> None:
    differing = [name for name, value in expected[0].items() if not torch.equal(value, found[0][name])]
    for name, state in expected[1]["state"].items():
        differing += [
            f"{key} of {name}" for key, value in state.items() if not torch.equal(value, found[1]["state"][name][key])
        ]
    if differing or expected[1]["param_groups"] != found[1]["param_groups"]:
        raise SystemExit(f"other values: {differing}")


def main() -> None:
    numbers = [int(number) for number in sys.argv[1:]] or range(len(CASES))
    with tempfile.TemporaryDirectory() as scratch:
        for number in numbers:
            saved, *loaded = CASES[number]
            for turn, (ranks, kind) in enumerate((saved, *loaded)):
                store, folder = f"{scratch}/store{number}-{turn}", f"{scratch}/{number}"
                mp.start_processes(_rank, (ranks, store, kind, folder, turn == 0), nprocs=ranks, start_method="fork")
                print(f"{saved[1]} on {saved[0]}", "saved" if turn == 0 else f"loaded: {kind} on {ranks}", flush=True)
            assert not list(pathlib.Path(scratch).glob(".shardplan-*"))


if __name__ == "__main__":
    sys.exit(main())
