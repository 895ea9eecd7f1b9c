# SPDX-License-Identifier: Apache-2.0
"""Host time per unit and step: the adapter next to real FSDP2, in one process, communication faked.

    .venv/bin/python tests/benchmarks/bench_adapter_host_time.py

Model: 100 units of six small parameters (many_units.py) on the CPU; process group: torch's "fake" backend with 8 ranks,
whose collectives move nothing over a wire. Reported: what each wrapper adds to the plain model's time, forward and
backward apart, divided by the number of units; median over the steps, the models taking turns. The fake
all_gather is not free (it copies the shard once per rank), so its own cost is measured and shown too.
"""

from __future__ import annotations

import argparse
import gc
import pathlib
import statistics
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tools" / "python"), str(ROOT / "examples" / "train_gpt")]

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import make_plan
from many_units import BATCH, UNITS, WIDTH, ManyUnits


def with_fsdp2() -> nn.Module:
    model = ManyUnits()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def step_ns(model: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """(forward, backward) of one step; gradients are dropped after it, untimed."""
    start = time.perf_counter_ns()
    loss = model(x).sum()
    middle = time.perf_counter_ns()
    loss.backward()
    end = time.perf_counter_ns()
    for parameter in model.parameters():
        parameter.grad = None
    return middle - start, end - middle


def measure(models: dict[str, nn.Module], steps: int) -> dict[str, tuple[float, float]]:
    """Median (forward, backward) in microseconds per unit."""
    x = torch.randn(BATCH, WIDTH)
    times: dict[str, list[tuple[int, int]]] = {name: [] for name in models}
    gc.collect()
    gc.disable()
    for step in range(steps + 5):
        for name, model in models.items():
            measured = step_ns(model, x)
            if step >= 5:
                times[name].append(measured)
    gc.enable()
    return {
        name: tuple(statistics.median(t[i] for t in taken) / 1e3 / UNITS for i in (0, 1))
        for name, taken in times.items()
    }


def collective_us(ranks: int) -> tuple[float, float]:
    """One fake all_gather and one fake reduce_scatter of a unit's size, through the backend itself."""
    numel = sum(p.numel() for p in ManyUnits(1).blocks[0].parameters())
    shard, full = torch.empty(-(-numel // ranks)), torch.empty(-(-numel // ranks) * ranks)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))

    def per_call(function) -> float:
        start = time.perf_counter_ns()
        for _ in range(2000):
            function()
        return (time.perf_counter_ns() - start) / 2000 / 1e3

    return (
        per_call(lambda: backend._allgather_base(full, shard)),
        per_call(lambda: backend._reduce_scatter_base(shard, full)),
    )


def made_plan(ranks: int):
    import shardplan.torch as sp

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        trace = make_plan.make_trace(path, "many_units:traced", HERE, BATCH, 1)
        return sp.load_plan(make_plan.make_plan(path, trace, ranks, "plan", "--unit", "blocks.*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", help="plan of many_units:traced, fsdp2, units blocks.* (default: made now)")
    parser.add_argument("--ranks", type=int, default=8, help="of the plan made now (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    import shardplan.torch as sp

    plan = sp.load_plan(args.plan) if args.plan else made_plan(args.ranks)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.world_size)
    models = {
        "plain": ManyUnits(), "fsdp2": with_fsdp2(), "shardplan": sp.apply(ManyUnits(), plan),
        "sp.auto": sp.auto(ManyUnits(), plans=None, quiet=True),
    }
    times = measure(models, args.steps)
    gather, scatter = collective_us(plan.world_size)
    print(f"{UNITS} units, {plan.world_size} ranks (faked), median of {args.steps} steps, microseconds per unit")
    print(f"{'':22s}{'forward':>10s}{'backward':>10s}{'step':>10s}")
    added = {}
    for name, (forward, backward) in times.items():
        print(f"{name:22s}{forward:10.1f}{backward:10.1f}{forward + backward:10.1f}")
        added[name] = (forward - times["plain"][0], backward - times["plain"][1])
    for name in ("fsdp2", "shardplan", "sp.auto"):
        forward, backward = added[name]
        print(f"{'added by ' + name:22s}{forward:10.1f}{backward:10.1f}{forward + backward:10.1f}")
    for name in ("shardplan", "sp.auto"):
        ratios = [added[name][i] / added["fsdp2"][i] for i in (0, 1)]
        total = sum(added[name]) / sum(added["fsdp2"])
        print(f"{'ratio of ' + name:22s}{ratios[0]:10.3f}{ratios[1]:10.3f}{total:10.3f}   (aim: 0.08)")
    print(f"of that the fake collectives themselves: all_gather {gather:.1f} us, reduce_scatter {scatter:.1f} us")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
