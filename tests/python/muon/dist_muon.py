# SPDX-License-Identifier: Apache-2.0
"""torchtitan's DistMuon next to sp.Muon on CUDA ranks, with the same gradients and DistMuon's own owners. It is a
program, since DistMuon takes CUDA alone: tests run it on the device in software.

    SHARDPLAN_TEST_DEVICE=cuda python dist_muon.py
"""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import sys
import tempfile

import torch
import torch.distributed as dist
from muon_models import make_mesh, set_gradients, sharded, whole
from muon_plans import document, written
from muon_ranks import LAYER, UNEVEN, units

UNITS = units(LAYER, {"wide": (70, 128), "tall": (130, 64), **UNEVEN}, LAYER)
STEPS = 3
MESHES = ((1, 2), (1, 3), (1, 4), (2, 2))  # replicas, shards


@contextlib.contextmanager
def recorded(calls: list):
    """Split sizes of each all_to_all that is issued inside: what is sent, and what is received."""
    original = dist.all_to_all_single

    def record(output, source, output_split_sizes, input_split_sizes, *rest, **named):
        calls.append((list(input_split_sizes), list(output_split_sizes), str(source.dtype)))
        return original(output, source, output_split_sizes, input_split_sizes, *rest, **named)

    dist.all_to_all_single = record
    try:
        yield
    finally:
        dist.all_to_all_single = original


def their_owners(optimizer) -> list[dict[str, int]]:
    """By exchange: who has the whole of each parameter, as a position in the group."""
    result = []
    for plan in optimizer._bucket_plans:
        group = plan.group.participants
        result.append({})
        for item, route in zip(plan.redistributed_items, plan.redistribution_plans, strict=True):
            owners = [rank for rank in group if math.prod(route.compute_partition(rank).tensor_shape)]
            assert len(owners) == 1, owners
            result[-1][item.fqn] = group.index(owners[0])
    return result


def compare(replicas: int, shards: int) -> dict:
    import shardplan.torch as sp
    from torchtitan.distributed.flex_shard import build_dist_muon
    from torchtitan.distributed.flex_shard.optimizer_reshard import BucketConfig, ComputeLayout, Owned

    mesh = make_mesh(replicas, shards)
    theirs, ours = (sharded(UNITS, torch.float32, mesh) for _ in range(2))
    names = [fqn for of_unit in UNITS.values() for fqn in of_unit]
    dist_muon = build_dist_muon(
        [{"params": [theirs.get_parameter(fqn) for fqn in names], "param_names": names}],
        compute_sharding_by_fqn={fqn: ComputeLayout({"shard": Owned()}) for fqn in names},
        bucket_configs=[BucketConfig((f"{unit}.*",)) for unit in UNITS],
        lr=0.02,
    )
    plan = document(UNITS, shards, replicas, over_replicas=False, dtype="float32")
    fqns = {unit: list(parameters) for unit, parameters in UNITS.items()}
    for exchange, owners in zip(plan["exchanges"], their_owners(dist_muon), strict=True):
        for matrix in exchange["matrices"]:
            matrix["owner"] = owners[fqns[matrix["unit"]][matrix["parameter"]]]
    muon = sp.Muon(ours, plan=written(plan, replicas * shards), lr=0.02)
    routes: dict[str, list] = {"theirs": [], "ours": []}
    for step in range(STEPS):
        for name, model, optimizer in (("theirs", theirs, dist_muon), ("ours", ours, muon)):
            set_gradients(model, step)
            with recorded(routes[name]):
                optimizer.step()
    differences = {}
    for fqn in names:
        both = [whole(model.get_parameter(fqn)) for model in (ours, theirs)]
        differences[fqn] = (both[0] - both[1]).abs().max().item()
    return {"routes": routes, "differences": differences}


def main() -> None:
    from adapter_workers import run_on_ranks

    said = {}
    with tempfile.TemporaryDirectory() as folder:
        for replicas, shards in MESHES:
            where = pathlib.Path(folder, f"{replicas}x{shards}")
            outcomes = run_on_ranks(replicas * shards, where, compare, replicas, shards)
            if any(outcome is None or outcome[0] != "returned" for outcome in outcomes):
                sys.exit(f"{replicas} x {shards}: {outcomes}")
            said[where.name] = [outcome[1] for outcome in outcomes]
    print(json.dumps(said))


if __name__ == "__main__":
    main()
