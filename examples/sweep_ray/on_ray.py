# SPDX-License-Identifier: Apache-2.0
"""A sweep on a Ray cluster: every task is a part of it, wherever Ray puts the task, and its rows come back as text.

on_ray.py PARTS OUTPUT.csv ARGUMENTS...: ARGUMENTS as for `shardplan sweep`. The command has to be installed on every
node; traces are given by a path that all of them see.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import ray


@ray.remote(num_cpus=1, max_retries=3)
def part(number: int, parts: int, arguments: list[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.csv"
        own = ["-o", str(rows), "--part", f"{number}/{parts}", "--jobs", "1", "-q"]
        cut = arguments.index("--") if "--" in arguments else len(arguments)
        done = subprocess.run(
            ["shardplan", "sweep", *arguments[:cut], *own, *arguments[cut:]], capture_output=True, text=True
        )
        if done.returncode not in (0, 1):  # 1: nothing of this part fits
            raise RuntimeError(f"part {number} of {parts}: exit code {done.returncode}\n{done.stderr}")
        return rows.read_text()


def main() -> int:
    parts, output, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    ray.init(address="auto" if os.environ.get("RAY_ADDRESS") else "local", include_dashboard=False, log_to_driver=False)
    texts = ray.get([part.remote(i, parts, arguments) for i in range(1, parts + 1)])
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"part{i}.csv" for i in range(parts)]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
        return subprocess.run(["shardplan", "sweep", "--merge", *map(str, files), "-o", output]).returncode


if __name__ == "__main__":
    sys.exit(main())
