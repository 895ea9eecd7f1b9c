# SPDX-License-Identifier: Apache-2.0
"""Parameters that are DTensors already (tensor parallelism), by a plan and by real FSDP2: what runs on the ranks, and
the plan."""

from __future__ import annotations

import json
import pathlib
import subprocess

import torch
import torch.distributed as dist
import torch.nn as nn
from adapter_workers import DEVICE
from equivalence import Case, Fsdp2Calls, PlanCalls, Trainer, largest_difference, make_mesh, with_fsdp2
from equivalence_models import build
from equivalence_settings import BOTH, TWO, case

TENSOR = {"name": "tensor", "size": 2}
SIZES = {"width": 8, "hidden": 12}
CASES = [
    case(
        "tensor_parallel",
        ranks=4,
        arguments=SIZES,
        mesh=[{"name": "shard", "size": 2}, TENSOR],
        data_parallel={"shard": ["shard"]},
    ),
    # Between two dimensions that FSDP's is flattened from.
    case("tensor_parallel_between", ranks=8, arguments=SIZES, mesh=[TWO[0], TENSOR, TWO[1]], data_parallel=BOTH),
]
COLUMNS, ROWS = ("up.weight", "up.bias"), ("down.weight",)


def _placement(fqn: str) -> dict | None:
    """Placement of a parameter of parallel layers: column-wise up, row-wise down (its bias replicated)."""
    if not fqn.startswith("layers."):
        return None
    if fqn.endswith(COLUMNS):
        return {"mesh_dim": "tensor", "size": 2, "dim": 0}
    if fqn.endswith(ROWS):
        return {"mesh_dim": "tensor", "size": 2, "dim": 1}
    return {"mesh_dim": "tensor", "size": 2} if fqn.endswith("down.bias") else None


def make_plan(of: Case, folder: pathlib.Path, build_folder: pathlib.Path) -> str:
    """The trace of the whole model, told how the parameters are cut."""
    from equivalence_plans import make_plans

    whole = case("whole", ranks=of.ranks, arguments=of.arguments)
    make_plans([whole], folder, build_folder)
    trace = json.loads((folder / "mlp0.trace.json").read_text())
    for parameter in trace["parameters"]:
        if (placement := _placement(parameter["fqn"])) is not None:
            parameter["placements"] = [placement]
            if (dim := placement.get("dim", -1)) >= 0:
                parameter["shape"][dim] //= 2
    (folder / "cut.trace.json").write_text(json.dumps(trace))
    (folder / "strategy.json").write_text(
        json.dumps({"schema": "shardplan.strategy/1", "policy": "fsdp2", **of.strategy})
    )
    command = [build_folder / "bin" / "shardplan", "plan", "cut.trace.json", "--cluster", f"cluster{of.ranks}.json"]
    done = subprocess.run(
        [*map(str, command), "--strategy", "strategy.json", "-q", "-o", "cut.plan.json"],
        cwd=folder,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    return str(folder / "cut.plan.json")


def parallel_model(of: Case, mesh) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = build("mlp", of.arguments).to(DEVICE)
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def compare(of: Case, plan: str) -> tuple[float, str]:
    import shardplan.torch as sp

    mesh = make_mesh(of)
    ours = parallel_model(of, mesh)
    if mesh.get_rank() > 0 and mesh.get_local_rank(TENSOR["name"]) == 0:
        torch.nn.init.ones_(ours.layers[0].up.weight.to_local())  # what rank 0 has counts
    sp.apply(ours, plan, mesh, broadcast_from_rank_0=True)
    theirs = with_fsdp2(of, parallel_model(of, mesh), mesh)
    ours_up, theirs_up = (model.layers[0].up.weight for model in (ours, theirs))
    assert ours_up.placements == theirs_up.placements, (ours_up.placements, theirs_up.placements)
    assert ours_up.device_mesh.mesh.tolist() == theirs_up.device_mesh.mesh.tolist()
    trainers = SameBatch(of, mesh, ours, PlanCalls(ours)), SameBatch(of, mesh, theirs, Fsdp2Calls(theirs))
    worst = (0.0, "")
    for step in range(3):
        worst = max(worst, largest_difference(*(trainer.step(step) for trainer in trainers)))
    return worst


class SameBatch(Trainer):
    """The ranks of a tensor-parallel group see the same batch."""

    def __init__(self, of: Case, mesh, model: nn.Module, calls) -> None:
        super().__init__(of, model, calls)
        self.batch = min(dist.get_process_group_ranks(mesh.get_group("tensor")))

    def rank(self) -> int:
        return self.batch
