# SPDX-License-Identifier: Apache-2.0
"""Predicts the step of two GPTs on CPU ranks of this machine, or of a Llama on its GPU, trains them by the plan, and
lays both side by side.

    .venv/bin/python examples/predict_and_measure/predict_and_measure.py OUTPUT_FOLDER
        [--device cuda] [--runs 5] [--cluster here.json]

The machine is measured first, unless --cluster gives an earlier measurement. Kernels and collectives are measured one
by one (`shardplan calibrate`), then other, smaller jobs, whose steps correct a few figures (`calibrate --from`).
Nothing is fitted to the steps that are predicted. OUTPUT_FOLDER gets the cluster, and for each job trace, plan and the
measured report of each run; table.md has the times. Standard output says whether the memory of a step is the plan's, to
the byte. On a GPU the allocator may give a request up to 1 MiB more. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tools" / "python"), str(ROOT / "examples" / "train_gpt")]

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from jobs import JOBS, Job
from make_plan import run
from model import loss_fn
from torch.distributed.device_mesh import init_device_mesh

RANKS = {"cpu": 2, "cuda": 1}
WARMUP = 2
REFERENCE_RUNS = 3  # one run may be slower than the next by a tenth
FIGURES = {"cpu": "matmul,memory,host,optimizer,latency,inner_link", "cuda": "matmul,memory,host"}
TRACED = {"cpu": ("--dtype", "float32", "--sdpa", "cpu"), "cuda": ("--dtype", "bfloat16", "--param-dtype", "float32")}
PLANNED = {"cpu": (), "cuda": ("--param-dtype", "bfloat16", "--reduce-dtype", "float32")}
SPLIT_BYTES = 1 << 20  # a block of the caching allocator is not split where no more than this would be left


def batches_of(job: Job, rank: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    rows = [torch.randint(job.vocabulary, (job.batch, job.sequence + 1), generator=generator) for _ in range(count)]
    return [(row[:, :-1].contiguous().to(job.device), row[:, 1:].contiguous().to(job.device)) for row in rows]


def train(rank: int, name: str, plan: str, store: str, report: str) -> None:
    """A rank of a run: the first one writes its report."""
    import shardplan.torch as sp

    job = JOBS[name]
    ranks = RANKS[job.device]
    if job.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank)
    backend = "gloo" if job.device == "cpu" else "nccl"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=120)
    )
    mesh = init_device_mesh(job.device, (ranks,))
    batches = batches_of(job, rank, 4)
    if job.device == "cpu":
        # Tensors that are there already are not the step's: a plan knows a step's own batch, not the loop's and not the
        # mesh's table of ranks.
        sp.count_cpu_memory()
    torch.manual_seed(7)
    with torch.device(job.device):
        model = job.make()
    model = sp.apply(model, plan, mesh)
    optimizer = job.optimizer(model.parameters(), lr=job.learning_rate)
    step = 0
    with sp.profile(model, steps=job.steps, warmup=WARMUP, quiet=True) as profile:
        while not profile.done:
            ids, targets = (tensor.clone() for tensor in batches[step % len(batches)])
            loss_fn(model(ids), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    profile.save(report, all_ranks=True)
    dist.barrier()
    del model, optimizer, profile
    gc.collect()  # models hold the process groups, whose threads must end before the interpreter does
    dist.destroy_process_group()


def measured(name: str, plan: pathlib.Path, report: pathlib.Path) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (name, str(plan), os.path.join(folder, "store"), str(report)), nprocs=RANKS[JOBS[name].device])
    return json.loads(report.read_text())


def predicted(name: str, cluster: pathlib.Path, folder: pathlib.Path) -> tuple[pathlib.Path, dict]:
    job = JOBS[name]
    trace, plan, report = (folder / f"{name}.{what}.json" for what in ("trace", "plan", "predicted"))
    run(
        "trace", f"jobs:{name}", "--batch", job.batch, "--seq", job.sequence, *TRACED[job.device], "-o", trace, cwd=HERE
    )
    run(
        "plan", trace, "--cluster", cluster, "--policy", "fsdp2", "--unit", job.unit, "--optimizer",
        job.planned_optimizer, *PLANNED[job.device], "-q", "-o", plan,
    )
    run("simulate", plan, "--report", report)
    expected = json.loads(report.read_text())
    if job.device == "cuda":  # and what kernels take for themselves
        rows = folder / f"{name}.memory.json"
        run("memory", plan, "--rows", rows)
        expected["memory"]["peak_bytes"] = json.loads(rows.read_text())["peak"]["total_bytes"]
    return plan, expected


def measured_machine(folder: pathlib.Path, device: str) -> pathlib.Path:
    """The cluster document of this machine."""
    say("measuring kernels and collectives (minutes)")
    kernels, cluster = folder / "kernels.json", folder / "here.json"
    threads = ("--threads", 1) if device == "cpu" else ()
    run(
        "calibrate", "--device", device, "--ranks", RANKS[device], *threads, "--measured", folder / "measurements.json",
        "-o", kernels,
    )
    plans, reports = [], []
    for name, job in JOBS.items():
        if job.reference and job.device == device:
            say(f"measuring {name}")
            plans.append(predicted(name, kernels, folder)[0])
            for number in range(1, REFERENCE_RUNS + 1):
                reports.append(folder / f"{name}.measured.{number}.json")
                measured(name, plans[-1], reports[-1])
    told = run(
        "calibrate", "--from", *reports, "--plan", *plans, "--base", kernels, "--figures", FIGURES[device], "--name",
        "this machine", "-o", cluster,
    )
    print(told, file=sys.stderr)
    return cluster


def say(text: str) -> None:
    print(f"predict_and_measure: {text}", file=sys.stderr, flush=True)


def row_of(name: str, expected: dict, reports: list[dict]) -> str:
    """Steps that are not recorded are what training takes."""
    steps = [statistics.median(report["measured"]["unrecorded_steps_ns"]) for report in reports]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in JOBS[name].make().parameters())
    step, forecast = statistics.median(steps), expected["step_ns"]
    each = ", ".join(f"{ns / 1e6:.1f}" for ns in steps)
    return (
        f"| {name}, {parameters / 1e6:.1f} million parameters | {forecast / 1e6:.1f} | {step / 1e6:.1f} | "
        f"{100 * (forecast / step - 1):+.1f} % | {each} |"
    )


def memory_of(name: str, expected: dict, reports: list[dict]) -> tuple[bool, str]:
    """Whether every run's peak is the plan's, and what to say of it."""
    of_plan, peaks = expected["memory"]["peak_bytes"], sorted({report["memory"]["peak_bytes"] for report in reports})
    if peaks == [of_plan]:
        return True, f"{name}: peak of a step {of_plan} bytes, by the plan and measured"
    if JOBS[name].device == "cuda":
        blocks = [round((peak - of_plan) / SPLIT_BYTES, 2) for peak in peaks]
        return (
            abs(max(peaks) / of_plan - 1) < 0.01,
            f"{name}: peak of a step {of_plan} bytes by the plan, measured "
            f"{', '.join(f'{more} MiB more' for more in blocks)}",
        )
    return False, f"{name}: peak of a step {of_plan} bytes by the plan, measured {', '.join(map(str, peaks))}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, metavar="OUTPUT_FOLDER")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="two CPU ranks, or the first GPU (default: %(default)s)",
    )
    parser.add_argument("--runs", type=int, default=5, help="of each job (default: %(default)s)")
    parser.add_argument("--cluster", type=pathlib.Path, metavar="FILE", help="of this machine, instead of measuring it")
    parser.add_argument("--only", choices=sorted(JOBS), help="this job alone")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # For the command: jobs.py's.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT / "examples" / "train_gpt"), os.environ.get("PYTHONPATH")))
    )
    arguments.folder.mkdir(parents=True, exist_ok=True)
    folder = arguments.folder.resolve()
    cluster = arguments.cluster.resolve() if arguments.cluster else measured_machine(folder, arguments.device)
    table = ["| job | predicted, ms | measured, ms | error | medians of the runs |", "|---|---|---|---|---|"]
    equal = True
    for name in (
        [arguments.only]
        if arguments.only
        else [name for name, job in JOBS.items() if not job.reference and job.device == arguments.device]
    ):
        plan, expected = predicted(name, cluster, folder)
        reports = []
        for number in range(1, arguments.runs + 1):
            reports.append(measured(name, plan, folder / f"{name}.measured.{number}.json"))
            say(
                f"{name}: run {number} of {arguments.runs}, step "
                f"{statistics.median(reports[-1]['measured']['unrecorded_steps_ns']) / 1e6:.1f} ms, predicted "
                f"{expected['step_ns'] / 1e6:.1f}"
            )
        table.append(row_of(name, expected, reports))
        same, line = memory_of(name, expected, reports)
        equal &= same
        print(line, flush=True)
    (folder / "table.md").write_text("\n".join(table) + "\n")
    print("\n".join(table), file=sys.stderr)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
