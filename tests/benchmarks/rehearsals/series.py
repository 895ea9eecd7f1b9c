#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rehearses other people's training scripts by their own command lines and prints what was found beside what they
published, as Markdown.

    tests/benchmarks/rehearsals/series.py [--kempnerforge CHECKOUT] [--only TEXT[,TEXT]]
        [--python ENVIRONMENT=PYTHON] [--again | --kept]

CHECKOUT is a git clone of KempnerInstitute/KempnerForge that the caller has; without it those rows are left out. Each
row runs once: its result is kept in OUT/NAME.json (default out/rehearsals), and `--again` runs it anew. Runs go one
after the other. docs/internals/rehearsal-figures.md has the tables.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import assets
import frameworks
import kempnerforge
from rows import Row

ROOT = pathlib.Path(__file__).resolve().parents[3]
GIB = 2**30


def checkout(source: pathlib.Path, commit: str, out: pathlib.Path) -> pathlib.Path:
    """The files of `commit` in a folder of their own; the caller's clone stays as it is."""
    folder = out / "kempnerforge" / commit
    if not folder.exists():
        folder.mkdir(parents=True)
        archive = subprocess.run(["git", "-C", str(source), "archive", commit], stdout=subprocess.PIPE, check=True)
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
        given += ["--cluster", row.cluster]
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
            "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
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
    if not result.get("step_ns"):
        return f"| {row.title} | {row.gpus} | - | - | {row.published_tokens} | | {row.note} |"
    tokens = row.tokens / (result["step_ns"] / 1e9)
    off = f"{100 * (tokens / row.published_tokens - 1):+.1f} %"
    return (
        f"| {row.title} | {row.gpus} | {result['step_ns'] / 1e6:.1f} | {tokens:.0f} | {row.published_tokens} | {off} | "
        f"{row.note} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kempnerforge", type=pathlib.Path, metavar="CHECKOUT")
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
        "| job | GPUs | step ms | tokens/s per GPU | published | difference | |\n|---|---|---|---|---|---|---|"
        if arguments.times
        else "| job | GPUs | allocated GiB | reserved GiB | published | difference | CPU s | "
        "|\n|---|---|---|---|---|---|---|---|"
    )
    for row in [*(kempnerforge.ROWS if arguments.kempnerforge else []), *frameworks.ROWS]:
        if texts and not any(text in row.name for text in texts):
            continue
        if arguments.times and not row.published_tokens:
            continue
        kept = arguments.out / f"{row.name}.json"
        if arguments.kept and not kept.exists():
            continue
        if arguments.again or not kept.exists():
            folder = (
                checkout(arguments.kempnerforge, row.commit, arguments.out)
                if row.commit
                else pathlib.Path(__file__).parents[3] / "examples" / "rehearse"
            )
            python = interpreters.get(row.environment, sys.executable)
            kept.write_text(
                json.dumps(run(row, folder, python, arguments.rehearse.split(), arguments.out, arguments.limit))
            )
        print((time_line if arguments.times else line)(row, json.loads(kept.read_text())), flush=True)


if __name__ == "__main__":
    main()
