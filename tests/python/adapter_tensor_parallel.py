"""Parameters that are DTensors already (tensor parallelism), by a plan and by real FSDP2: what runs on the ranks, and the plan."""

from __future__ import annotations

import json
import pathlib
import subprocess

import torch.distributed as dist
import torch.nn as nn
from equivalence import Fsdp2Calls, PlanCalls, Trainer, largest_difference, with_fsdp2
from equivalence_models import build
from equivalence_settings import case

CASE = case(
    "tensor_parallel",
    ranks=4,
    arguments={"width": 8, "hidden": 12},
    mesh=[{"name": "shard", "size": 2}, {"name": "tensor", "size": 2}],
)
COLUMNS, ROWS = ("up.weight", "up.bias"), ("down.weight",)


def _placement(fqn: str) -> dict | None:
    """Of the parameters of parallel layers: column-wise up, row-wise down (its bias replicated)."""
    if not fqn.startswith("layers."):
        return None
    if fqn.endswith(COLUMNS):
        return {"mesh_dim": "tensor", "size": 2, "dim": 0}
    if fqn.endswith(ROWS):
        return {"mesh_dim": "tensor", "size": 2, "dim": 1}
    return {"mesh_dim": "tensor", "size": 2} if fqn.endswith("down.bias") else None


def make_plan(folder: pathlib.Path, build_folder: pathlib.Path) -> str:
    """The trace of the whole model, told how the parameters are cut."""
    from equivalence_plans import make_plans

    whole = case("whole", ranks=4, arguments=CASE.arguments)
    make_plans([whole], folder, build_folder)
    trace = json.loads((folder / "mlp0.trace.json").read_text())
    for parameter in trace["parameters"]:
        if (placement := _placement(parameter["fqn"])) is not None:
            parameter["placements"] = [placement]
            if (dim := placement.get("dim", -1)) >= 0:
                parameter["shape"][dim] //= 2
    (folder / "cut.trace.json").write_text(json.dumps(trace))
    (folder / "strategy.json").write_text(
        json.dumps({"schema": "shardplan.strategy/1", "policy": "fsdp2", **CASE.strategy})
    )
    command = [build_folder / "bin" / "shardplan", "plan", "cut.trace.json", "--cluster", "cluster4.json"]
    done = subprocess.run(
        [*map(str, command), "--strategy", "strategy.json", "-q", "-o", "cut.plan.json"],
        cwd=folder,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    return str(folder / "cut.plan.json")


def parallel_model(mesh) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = build("mlp", CASE.arguments)
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def compare(plan: str) -> tuple[float, str]:
    import shardplan.torch as sp

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    ours = sp.apply(parallel_model(mesh), plan, mesh)
    theirs = with_fsdp2(CASE, parallel_model(mesh), mesh["shard"])
    ours_up, theirs_up = (model.layers[0].up.weight for model in (ours, theirs))
    assert ours_up.placements == theirs_up.placements, (ours_up.placements, theirs_up.placements)
    trainers = SameBatch(CASE, ours, PlanCalls(ours)), SameBatch(CASE, theirs, Fsdp2Calls(theirs))
    worst = (0.0, "")
    for step in range(3):
        worst = max(worst, largest_difference(*(trainer.step(step) for trainer in trainers)))
    return worst


class SameBatch(Trainer):
    """The ranks of a tensor-parallel group see the same batch."""

    def rank(self) -> int:
        return dist.get_rank() // 2
