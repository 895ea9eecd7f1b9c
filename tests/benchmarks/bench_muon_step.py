# SPDX-License-Identifier: Apache-2.0
"""Wall time of an optimizer step of Muon: sp.Muon by a plan's exchanges next to torch.optim.Muon, on the same FSDP2
parameters of a GPT of about 100 million parameters. On CPU ranks (Gloo) the simulator predicts both, too. With
SHARDPLAN_TEST_DEVICE=cuda on GPUs, and there torchtitan's DistMuon, which takes CUDA alone, is beside them: in the same
buckets, with its own owners. Without a GPU that runs on the device in software (docs/internals/device.md).

    .venv/bin/python tests/benchmarks/bench_muon_step.py [--ranks 4] [--steps 5] [--blocks-each 12] [--cluster FILE]
    SHARDPLAN_TEST_DEVICE=cuda dev/on_device build/dev/device/libshardplan_device.so \\
        .venv/bin/python tests/benchmarks/bench_muon_step.py

All step in the same processes, in turn, with the same gradients. Reported are medians over the steps of the slowest
rank, seconds of CPU of all ranks, and the plan's ratios to the others (below 1: the plan is faster). Seconds of CPU say
more on a machine that others use. Muon steps the matrices of the blocks, `--blocks-each` of them in an exchange: the
rest is frozen.

Predicted is the optimizer's time of both plans on a cluster that the same ranks measure between the steps
(muon_rates.py), one operation at a time. The host's work for DTensor is that of steps whose matrices compute nothing.
Nothing is fitted to a step of these.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [
    str(HERE), str(ROOT / "tests" / "python" / "adapter"), str(ROOT / "tools" / "python"),
    str(ROOT / "examples" / "train_gpt"),
]

import make_plan  # noqa: E402
import muon_rates  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn as nn  # noqa: E402
from adapter_workers import DEVICE, run_on_ranks  # noqa: E402
from bench_adapter_gpt_step import BATCH, CONFIG, SEQUENCE, big_gpt, finish, with_fsdp2  # noqa: E402
from model import Gpt  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402

OWNERS = {"plan": "shards", "torch": "none"}  # of the plan that says what each optimizer does
OTHERS = ("torch", "dist_muon") if DEVICE == "cuda" else ("torch",)
Seconds = tuple[float, float]  # wall, CPU


def muon_gpt() -> nn.Module:
    """For `shardplan trace bench_muon_step:muon_gpt`: only Muon's matrices train."""
    return with_matrices_alone(big_gpt())


def tiny_gpt() -> nn.Module:
    """The same number of matrices, which are small."""
    return with_matrices_alone(Gpt(dataclasses.replace(CONFIG, vocabulary=64, heads=4, width=64)))


def with_matrices_alone(model: nn.Module) -> nn.Module:
    for fqn, parameter in model.named_parameters():
        parameter.requires_grad_(fqn.startswith("blocks.") and parameter.ndim == 2)
    return model


def make_trace(folder: pathlib.Path, ranks: int, model: str = "muon_gpt") -> pathlib.Path:
    trace = folder / f"{model}.trace.json"
    words = ("--batch", BATCH, "--seq", SEQUENCE, "--dtype", "float32", "--muon", ranks, "--muon-device", DEVICE)
    make_plan.run("trace", f"bench_muon_step:{model}", *words, "-o", trace, cwd=HERE)
    return trace


def buckets_of(blocks_each: int) -> list[tuple[str, ...]]:
    """Patterns of each exchange's matrices."""
    buckets = []
    for first in range(0, CONFIG.layers, blocks_each):
        blocks = range(first, min(first + blocks_each, CONFIG.layers))
        buckets.append(tuple(f"blocks.{n}{each}.weight" for n in blocks for each in (".*", ".*.*")))
    return buckets


def dist_muon(model: nn.Module, blocks_each: int) -> torch.optim.Optimizer:
    from torchtitan.distributed.flex_shard import build_dist_muon
    from torchtitan.distributed.flex_shard.optimizer_reshard import BucketConfig, ComputeLayout, Owned

    own = {fqn: parameter for fqn, parameter in model.named_parameters() if parameter.requires_grad}
    return build_dist_muon(
        [{"params": list(own.values()), "param_names": list(own)}],
        compute_sharding_by_fqn={fqn: ComputeLayout({"shard": Owned()}) for fqn in own},
        bucket_configs=[BucketConfig(patterns) for patterns in buckets_of(blocks_each)],
        lr=1e-3,
    )


def make_plans(
    folder: pathlib.Path, trace: pathlib.Path, ranks: int, blocks_each: int, cluster: pathlib.Path
) -> dict[str, pathlib.Path]:
    """By optimizer."""
    buckets = []
    for patterns in buckets_of(blocks_each):
        buckets += ["--muon-bucket", ",".join(patterns)]
    plans = {}
    for name, owners in OWNERS.items():
        plans[name] = folder / f"{cluster.stem}.{name}.json"
        words = ("--optimizer", "muon", "--muon-owners", owners, *(buckets if owners != "none" else ()))
        make_plan.run(
            "plan", trace, "--ranks", ranks, "--cluster", cluster, "--unit", "blocks.*", *words, "-q", "-o", plans[name]
        )
    return plans


def exchanged_bytes(model: nn.Module, ranks: int, blocks_each: int) -> int:
    """A rank's part of an exchange, in bfloat16."""
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return numel * torch.bfloat16.itemsize * blocks_each // CONFIG.layers // ranks


def rates_of(traces: dict[str, str], mesh: DeviceMesh, exchanged: int) -> muon_rates.Rates:
    trace, tiny = (json.loads(pathlib.Path(traces[name]).read_text()) for name in ("muon_gpt", "tiny_gpt"))
    own = [parameter for parameter in with_fsdp2(tiny_gpt(), mesh).parameters() if parameter.requires_grad]
    for parameter in own:
        parameter.grad = torch.randn_like(parameter)
    operators = muon_rates.operators_of(tiny, [tuple(parameter.shape) for parameter in own], mesh.size())
    optimizer = torch.optim.Muon(own, lr=1e-3)
    optimizer.step()  # makes the states
    return muon_rates.Rates(trace, exchanged, optimizer.step, operators)


def measure(
    traces: dict[str, str], plan: str, steps: int, blocks_each: int
) -> tuple[dict[str, list[Seconds]], dict[muon_rates.Row, list[float]]]:
    """Each step, and samples of the operations between them."""
    import shardplan.torch as sp

    torch.manual_seed(7)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = with_fsdp2(muon_gpt().to(DEVICE), mesh)
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizers = {"plan": sp.Muon(model, plan=plan, lr=1e-3), "torch": torch.optim.Muon(own, lr=1e-3)}
    if "dist_muon" in OTHERS:
        optimizers["dist_muon"] = dist_muon(model, blocks_each)
    for parameter in own:
        parameter.grad = torch.randn_like(parameter)
    times: dict[str, list[Seconds]] = {name: [] for name in optimizers}
    rates = None
    if DEVICE == "cpu":
        rates = rates_of(traces, mesh, exchanged_bytes(model, mesh.size(), blocks_each))
    for step in range(steps + 1):
        if rates:
            rates.round()
        names = list(optimizers)
        for name in names if step % 2 else names[::-1]:
            finish()
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            optimizers[name].step()
            finish()
            if step > 0:  # the first one makes the states
                times[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return times, rates.samples() if rates else {}


def predicted(
    folder: pathlib.Path, trace: pathlib.Path, measured: dict, ranks: int, blocks_each: int, cluster: pathlib.Path
) -> dict[str, float]:
    """Seconds of the optimizer, by optimizer."""
    rows = folder / "measured.json"
    rows.write_text(json.dumps(measured))
    make_plan.run("calibrate", "--from", rows, "-o", cluster)
    seconds = {}
    for name, plan in make_plans(folder, trace, ranks, blocks_each, cluster).items():
        report = folder / f"{name}.report.json"
        make_plan.run("simulate", plan, "--report", report)
        seconds[name] = json.loads(report.read_text())["optimizer_ns"] / 1e9
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--blocks-each", type=int, default=12)
    parser.add_argument("--cluster", type=pathlib.Path, help="keep the measured cluster document")
    arguments = parser.parse_args()
    ranks, steps, blocks_each = arguments.ranks, arguments.steps, arguments.blocks_each
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        trace = make_trace(folder, ranks)
        plans = make_plans(folder, trace, ranks, blocks_each, make_plan.cluster_of(folder, ranks))
        traces = {"muon_gpt": str(trace), "tiny_gpt": str(make_trace(folder, ranks, "tiny_gpt"))}
        settings = (traces, str(plans["plan"]), steps, blocks_each)
        outcomes = run_on_ranks(ranks, folder / "ranks", measure, *settings, timeout_s=1800)
        for rank, outcome in enumerate(outcomes):
            if outcome is None or outcome[0] != "returned":
                sys.exit(f"rank {rank}: {outcome}")
        times = [outcome[1][0] for outcome in outcomes]
        expected = {}
        if DEVICE == "cpu":
            measured = muon_rates.measurements([outcome[1][1] for outcome in outcomes])
            cluster = arguments.cluster or folder / "measured_cluster.json"
            expected = predicted(folder, trace, measured, ranks, blocks_each, cluster.resolve())
    seconds = {
        name: {
            "wall": [max(of_rank[name][step][0] for of_rank in times) for step in range(steps)],
            "CPU": [sum(of_rank[name][step][1] for of_rank in times) for step in range(steps)],
        }
        for name in ("plan", *OTHERS)
    }
    own = sum(p.numel() for p in muon_gpt().parameters() if p.requires_grad)
    print(f"Muon's step of {own / 1e6:.0f} million parameters, {ranks} ranks, {DEVICE}: seconds")
    for kind in ("wall", "CPU"):
        for what, of_steps in (("median", statistics.median), ("fastest", min)):
            ours = of_steps(seconds["plan"][kind])
            print(f"  {kind:4} {what:7} plan {ours:7.2f}", end="")
            for name in OTHERS:
                other = of_steps(seconds[name][kind])
                print(f"  {name} {other:7.2f}, ratio {ours / other:.3f}", end="")
            print()
    for name, second in expected.items():
        median = statistics.median(seconds[name]["wall"])
        print(f"  {name:5} predicted {second:7.2f}  measured {median:7.2f}  ratio {second / median:.3f}")


if __name__ == "__main__":
    main()
