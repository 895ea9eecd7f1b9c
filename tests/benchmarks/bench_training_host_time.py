# SPDX-License-Identifier: Apache-2.0
"""Host time per unit and step: a training in C++ beside the Python adapter, by one plan of one rank, without
communication.

    .venv/bin/python tests/benchmarks/bench_training_host_time.py

Model: 100 units of six small parameters, in Python (many_units.py) and in LibTorch (training_host_time.cc, which this
builds). Reported: what following the plan adds to the plain model of the same language, forward and backward apart,
divided by the number of units. Each is the median of the steps of a round, and of the rounds, in which the two take
turns.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist

from bench_adapter_host_time import BATCH, HERE, ROOT, UNITS, WIDTH, ManyUnits, make_plan, measure

BUILD = pathlib.Path(os.environ.get("SHARDPLAN_BUILD", ROOT / "build" / "dev"))
AIM = 0.5  # of the Python adapter's


def built() -> pathlib.Path:
    subprocess.run(["cmake", "--build", str(BUILD), "--target", "training_host_time"], check=True, stdout=sys.stderr)
    return BUILD / "tests" / "executor" / "training_host_time"


def in_cpp(program: pathlib.Path, plan: pathlib.Path, steps: int) -> dict[str, tuple[float, float]]:
    command = [program, plan, UNITS, WIDTH, BATCH, steps]
    printed = subprocess.run(
        [str(part) for part in command],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ).stdout.split()
    plain, planned = (tuple(map(float, printed[i : i + 2])) for i in (0, 2))
    return {"plain": plain, "planned": planned}


def median_of(rounds: list[dict[str, tuple[float, float]]], name: str) -> tuple[float, float]:
    return tuple(statistics.median(taken[name][i] for taken in rounds) for i in (0, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="of a round (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    import shardplan.torch as sp

    program = built()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        trace = make_plan.make_trace(path, "many_units:traced", HERE, BATCH, 1)
        plan = make_plan.make_plan(path, trace, 1, "plan", "--unit", "blocks.*")
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        models = {"plain": ManyUnits(), "planned": sp.apply(ManyUnits(), sp.load_plan(plan))}
        python, cpp = [], []
        for _ in range(args.rounds):
            python.append(measure(models, args.steps))
            cpp.append(in_cpp(program, plan, args.steps))
        dist.destroy_process_group()
    print(f"{UNITS} units, one rank, median of {args.rounds} rounds of {args.steps} steps, microseconds per unit")
    print(f"{'':22s}{'forward':>10s}{'backward':>10s}{'step':>10s}")
    added = {}
    for language, rounds in (("Python", python), ("C++", cpp)):
        plain, planned = median_of(rounds, "plain"), median_of(rounds, "planned")
        added[language] = tuple(b - a for a, b in zip(plain, planned))
        for name, row in (
            (f"{language}, plain", plain),
            (f"{language}, planned", planned),
            (f"added in {language}", added[language]),
        ):
            print(f"{name:22s}{row[0]:10.1f}{row[1]:10.1f}{sum(row):10.1f}")
    ratios = [ours / theirs for ours, theirs in zip(added["C++"], added["Python"])]
    print(
        f"{'C++ / Python':22s}{ratios[0]:10.3f}{ratios[1]:10.3f}{sum(added['C++']) / sum(added['Python']):10.3f}   "
        f"(aim: {AIM})"
    )


if __name__ == "__main__":
    main()
