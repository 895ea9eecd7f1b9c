# SPDX-License-Identifier: Apache-2.0
"""Makes the plan that train.py replays, by the commands a user would type:

    shardplan trace model:traced_gpt --batch 8 --seq 32 --dtype float32 -o trace.json
    shardplan plan trace.json --cluster cluster.json --policy fsdp2 --unit 'blocks.*' -o plan.json
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def shardplan_command() -> str:
    """The command on the PATH, else the repository's."""
    return shutil.which("shardplan") or str(ROOT / "tools" / "shardplan")


def run(*arguments: object, cwd: pathlib.Path = HERE) -> str:
    """Runs the command; returns its standard error."""
    paths = [str(cwd), str(ROOT / "tools" / "python"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [shardplan_command(), *map(str, arguments)], cwd=cwd, env=environment, text=True, capture_output=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"shardplan {' '.join(map(str, arguments))}: exit code {done.returncode}\n{done.stderr}")
    return done.stderr


def cluster_of(folder: pathlib.Path, ranks: int) -> pathlib.Path:
    """cluster.json for another number of ranks."""
    cluster = json.loads((HERE / "cluster.json").read_text())
    cluster["ranks"] = cluster["ranks_per_node"] = ranks
    path = folder / f"cluster{ranks}.json"
    path.write_text(json.dumps(cluster))
    return path


def make_trace(folder: pathlib.Path, model: str, cwd: pathlib.Path, batch: int, sequence: int) -> pathlib.Path:
    """Traces `model` (module:callable, found in `cwd`) in float32."""
    trace = folder / "trace.json"
    run("trace", model, "--batch", batch, "--seq", sequence, "--dtype", "float32", "-o", trace, cwd=cwd)
    return trace


def make_plan(folder: pathlib.Path, trace: pathlib.Path, ranks: int, name: str, *knobs: object) -> pathlib.Path:
    plan = folder / f"{name}.json"
    run("plan", trace, "--cluster", cluster_of(folder, ranks), "-q", "-o", plan, *knobs)
    return plan
