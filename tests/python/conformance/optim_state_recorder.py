# SPDX-License-Identifier: Apache-2.0
"""Records optimizer states of real FSDP1 in the form of tests/conformance/optim_state, at any world size:

    optim_state_recorder.py FOLDER RANKS flat|orig WIDTH
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig, FullStateDictConfig, ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Awkward(nn.Module):
    """Rows that no number of ranks divides, parameters of one element, one that is smaller than the ranks are many."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inp = nn.Linear(5, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, n), nn.GELU(), nn.Linear(n, width, bias=n % 2 == 0)) for n in (3, 8, 1)
        )
        self.out = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


def _units(model: nn.Module) -> list[dict]:
    rank, units = dist.get_rank(), []
    for name, module in model.named_modules():
        if not isinstance(module, FSDP) or module._handle is None:
            continue
        prefix = name.replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", "")
        flat = module._handle.flat_param
        shard = flat._sharded_size.numel()
        params = []
        for fqn, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos):
            part = {
                "fqn": ".".join(filter(None, (prefix.rstrip("."), fqn))), "shape": list(shape),
                "in_shard": info.in_shard,
            }
            if info.in_shard:
                part |= {
                    "offset_in_shard": info.offset_in_shard, "numel_in_shard": info.numel_in_shard,
                    "param_start": info.intra_param_start_idx,
                }
            params.append(part)
        padded = shard * dist.get_world_size()
        units.append(
            {
                "unit": prefix or "(root)", "padded_unsharded_numel": padded, "shard_numel": shard,
                "shard_start": rank * shard, "params": params,
            }
        )
    return units


def _plain(value: object) -> object:
    """A ShardedTensor as its shards."""
    if not hasattr(value, "local_shards"):
        return value
    places = [
        {"rank": s.placement.rank(), "offsets": list(s.shard_offsets), "sizes": list(s.shard_sizes)}
        for s in value.metadata().shards_metadata
    ]
    local = [
        {"offsets": list(s.metadata.shard_offsets), "sizes": list(s.metadata.shard_sizes), "tensor": s.tensor.clone()}
        for s in value.local_shards()
    ]
    return {"kind": "ShardedTensor", "global_shape": list(value.size()), "all_shards": places, "local": local}


def record(folder: str, original: bool, width: int) -> None:
    warnings.simplefilter("ignore")
    place, rank, ranks = pathlib.Path(folder), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(width)
    model = FSDP(
        Awkward(width),
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        use_orig_params=original,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(3):
        torch.manual_seed(100 * step + rank)
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(optimizer.state_dict(), place / f"local_optim_state.rank{rank}.pt")
    with FSDP.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=False),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    ):
        sharded = FSDP.optim_state_dict(model, optimizer)
    sharded["state"] = {
        name: {key: _plain(value) for key, value in of.items()} for name, of in sharded["state"].items()
    }
    torch.save(sharded, place / f"sharded_optim_state.rank{rank}.pt")
    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
    ):
        full, of_model = FSDP.optim_state_dict(model, optimizer), model.state_dict()
    of_ranks: list = [None] * ranks
    dist.all_gather_object(of_ranks, _units(model))
    if rank == 0:
        torch.save(full, place / "full_optim_state.pt")
        torch.save({name: value.clone() for name, value in of_model.items()}, place / "full_model_state.pt")
        layout = {
            "world_size": ranks,
            "use_orig_params": original,
            "ranks": [{"rank": r, "units": units} for r, units in enumerate(of_ranks)],
        }
        (place / "layout.json").write_text(json.dumps(layout))


def _rank(rank: int, ranks: int, store: str, folder: str, variant: str, width: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    record(folder, variant == "orig", width)
    dist.destroy_process_group()


def main(folder: str, ranks: str, variant: str, width: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        mp.start_processes(
            _rank, (int(ranks), f"{scratch}/store", folder, variant, int(width)), nprocs=int(ranks), start_method="fork"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
