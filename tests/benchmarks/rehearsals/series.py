#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rehearses other people's training scripts by their own command lines and prints what was found beside what they
published, as Markdown.

    tests/benchmarks/rehearsals/series.py [--kempnerforge CLONE] [--fms-fsdp CLONE] [--torchtitan CLONE]
        [--only TEXT[,TEXT]] [--python ENVIRONMENT=PYTHON] [--again | --kept] [--times]

CLONE is a git clone of KempnerInstitute/KempnerForge, foundation-model-stack/fms-fsdp or pytorch/torchtitan that the
caller has; without it its rows are left out. Each row runs once: its result is kept in OUT/NAME.json (default
out/rehearsals), and `--again` runs it anew. Runs go one after the other. docs/internals/rehearsal-figures.md has the
tables.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import assets
import foundation
import frameworks
import kempnerforge
from rows import Row

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
IMPORTED = HERE / "imported"  # modules that rows name
GIB = 2**30
CLONES = ("kempnerforge", "fms-fsdp", "torchtitan")
FILES = {"torchtitan": ["torchtitan"]}  # that are needed of a clone; default: all


def checkout(source: pathlib.Path, folder: pathlib.Path, commit: str, files: list[str]) -> pathlib.Path:
    """The files of `commit` in a folder of their own; the caller's clone stays as it is."""
    if not folder.exists():
        folder.mkdir(parents=True)
        archive = subprocess.run(
            ["git", "-C", str(source), "archive", commit, *files], stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def peaks(report: pathlib.Path) -> dict:
    """Peaks of the whole run in the report of `shardplan rehearse`, in bytes; the time of a step, where it has one."""
    document = json.loads(report.read_text())
    memory = document["memory"]
    return {
        "allocated": memory["peak_bytes"], "reserved": memory["reserved_bytes"], "step_ns": document["step_ns"],
    }  # fmt: skip


def run(row: Row, folder: pathlib.Path, python: str, rehearse: list[str], out: pathlib.Path, limit_s: int) -> dict:
    """Rehearses one row in `folder`. Seconds are of a processor, the launcher's children included."""
    report, log = out / f"{row.name}.report.json", out / f"{row.name}.log"
    report.unlink(missing_ok=True)
    given = [
        *rehearse, "--gpus", str(row.gpus), "--rank", str(row.rank), "--device-memory", row.device_memory, "--report",
        str(report),
    ]
    if row.cluster:
        given += ["--cluster", row.cluster.replace("{assets}", str(out / "assets"))]
    if row.routing:
        shares = out / f"{row.name}.routing.csv"
        shares.write_text("\n".join(map(str, row.routing)) + "\n")
        given += ["--routing", str(shares)]
    command = [word.replace("{assets}", str(out / "assets")) for word in row.command]
    environment = (
        os.environ
        | row.variables
        | {
            "PATH": f"{pathlib.Path(python).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{folder}:{IMPORTED}:{os.environ.get('PYTHONPATH', '')}",
        }
    )
    start = time.monotonic()
    with open(log, "w") as written:
        child = subprocess.Popen(
            ["timeout", str(limit_s), *given, "--", *command],
            cwd=folder,
            env=environment,
            stdout=written,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(child.pid, 0)
    result = {
        "exit": os.waitstatus_to_exitcode(status),
        "wall_s": round(time.monotonic() - start, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "host_gib": round(usage.ru_maxrss * 1024 / GIB, 2),
    }
    return result | (peaks(report) if report.exists() else {})


def line(row: Row, result: dict) -> str:
    published = f"{row.published_gib:.1f}" if row.published_gib else "-"
    if "allocated" not in result:
        return (
            f"| {row.title} | {row.gpus} | stopped ({result['exit']}) | | {published} | | {result['cpu_s']:.0f} | "
            f"{row.note} |"
        )
    off = f"{100 * (result[row.published_of] / GIB / row.published_gib - 1):+.1f} %" if row.published_gib else "-"
    stopped = "" if result["exit"] == 0 else f"exit code {result['exit']}; "
    return (
        f"| {row.title} | {row.gpus} | {result['allocated'] / GIB:.2f} | {result['reserved'] / GIB:.2f} | {published} "
        f"| {off} | {result['cpu_s']:.0f} | {stopped}{row.note} |"
    )


def time_line(row: Row, result: dict) -> str:
    """Tokens/s of a GPU, simulated from what the rank issued, beside what was published."""
    off, cluster = difference(row, result), pathlib.PurePath(row.cluster).stem
    if off is None:
        return f"| {row.title} | `{cluster}` | {row.gpus} | stopped ({result['exit']}) | | {row.published_tokens} | |"
    return (
        f"| {row.title} | `{cluster}` | {row.gpus} | {result['step_ns'] / 1e6:.1f} | "
        f"{row.tokens / (result['step_ns'] / 1e9):.0f} | {row.published_tokens} | {100 * off:+.1f} % |"
    )


def difference(row: Row, result: dict) -> float | None:
    """Distance of rehearsed tokens/s from published ones, a part of these. None: the run stopped, and what it timed is
    no step."""
    if result["exit"] != 0 or not result.get("step_ns"):
        return None
    return row.tokens / (result["step_ns"] / 1e9) / row.published_tokens - 1


def summary(differences: list[float]) -> str:
    off = sorted(abs(one) for one in differences)
    nine_of_ten = off[-(-9 * len(off) // 10) - 1]
    return (
        f"\n{len(off)} rows: the median is {100 * statistics.median(off):.1f} % off, nine of ten are within "
        f"{100 * nine_of_ten:.0f} %."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in CLONES:
        parser.add_argument(f"--{name}", type=pathlib.Path, metavar="CLONE")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "out" / "rehearsals")
    parser.add_argument("--only", default="", help="rows whose name has one of these texts")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="ENVIRONMENT=PYTHON",
        help="the interpreter of an environment that rows name",
    )
    parser.add_argument("--rehearse", default=f"{ROOT}/tools/shardplan rehearse", help="the command's words")
    parser.add_argument("--limit", type=int, default=900, metavar="SECONDS")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--times", action="store_true", help="the table of times; rows that published some alone")
    parser.add_argument("--kept", action="store_true", help="run nothing: print the rows that were run")
    arguments = parser.parse_args()
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    interpreters = dict(given.split("=", 1) for given in arguments.python)
    assets.make(arguments.out / "assets")
    texts = [text for text in arguments.only.split(",") if text]
    print(
        "| job | cluster | GPUs | step ms | tokens/s per GPU | published | difference |\n|---|---|---|---|---|---|---|"
        if arguments.times
        else "| job | GPUs | allocated GiB | reserved GiB | published | difference | CPU s | "
        "|\n|---|---|---|---|---|---|---|---|"
    )
    clones = {name: given for name in CLONES if (given := getattr(arguments, name.replace("-", "_")))}
    differences = []
    for row in [*kempnerforge.ROWS, *frameworks.ROWS, *foundation.ROWS]:
        if row.repository and row.repository not in clones:
            continue
        if texts and not any(text in row.name for text in texts):
            continue
        if arguments.times and not row.published_tokens:
            continue
        kept = arguments.out / f"{row.name}.json"
        if arguments.kept and not kept.exists():
            continue
        if arguments.again or not kept.exists():
            folder = (
                checkout(
                    clones[row.repository], arguments.out / row.repository / row.commit, row.commit,
                    FILES.get(row.repository, []),
                )
                if row.repository
                else ROOT / "examples" / "rehearse"
            )
            python = interpreters.get(row.environment, sys.executable)
            kept.write_text(
                json.dumps(run(row, folder, python, arguments.rehearse.split(), arguments.out, arguments.limit))
            )
        result = json.loads(kept.read_text())
        print((time_line if arguments.times else line)(row, result), flush=True)
        if arguments.times and (off := difference(row, result)) is not None:
            differences.append(off)
    if differences:
        print(summary(differences))


if __name__ == "__main__":
    main()
