# SPDX-License-Identifier: Apache-2.0
"""Ranks of trainings, in C++ and in Python, and plans for them."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable

import warm
from conftest import ROOT, build_folder

GPT = ROOT / "examples" / "gpt_cpp"
TEXT = ROOT / "examples" / "train_gpt" / "text.txt"
WORKER = build_folder() / "tests" / "executor" / "training_worker"
REFERENCE = pathlib.Path(__file__).with_name("reference_training.py")


@dataclasses.dataclass
class Finished:
    """The end of a run, by rank: the lines that it printed, its exit code, and its standard error."""

    lines: list[list[str]]
    codes: list[int]
    errors: list[str]


def environment() -> dict[str, str]:
    paths = [ROOT / "tools" / "python", build_folder() / "python", GPT]
    own = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1", "SHARDPLAN_BUILD": str(build_folder()),
    }
    return {**os.environ, **own}


def _started(words: list[str], folder: str) -> subprocess.Popen:
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment()
    )


def _warm(words: list[str], folder: str) -> warm.Program:
    return warm.Program(words, env=environment(), cwd=folder)


def run_ranks(
    program: object, ranks: int, timeout: float = 120, start: Callable = _started, **settings: object
) -> Finished:
    """`program` as that many processes, which meet at a file of their own."""
    with tempfile.TemporaryDirectory() as folder:
        told = [f"{name}={value}" for name, value in {"store": f"{folder}/store", "ranks": ranks, **settings}.items()]
        started = [start([str(program), f"rank={rank}", *told], folder) for rank in range(ranks)]
        try:
            said = [process.communicate(timeout=timeout) for process in started]
        finally:
            for process in started:
                process.kill()
    return Finished(
        [out.splitlines() for out, _ in said], [process.returncode for process in started], [err for _, err in said]
    )


def in_cpp(ranks: int, **settings: object) -> Finished:
    return run_ranks(WORKER, ranks, text=TEXT, **settings)


def in_python(ranks: int, **settings: object) -> Finished:
    return run_ranks(REFERENCE, ranks, start=_warm, **settings)


class Plans:
    """Plans of the example's GPT, each made once. `size`: what differs from its Config."""

    def __init__(self, folder: pathlib.Path, shardplan, size: str = "layers=3, width=44") -> None:
        self._folder, self._shardplan, self._size = folder, shardplan, size
        self._made: dict[tuple, pathlib.Path] = {}

    def _run(self, *arguments: object) -> None:
        done = self._shardplan(*arguments, cwd=self._folder, **environment())
        assert done.returncode == 0, done.stderr

    def trace(self, frozen: str = "") -> pathlib.Path:
        path = self._folder / f"trace{frozen}.json"
        if not path.exists():
            name = f"traced_{abs(hash(frozen))}"
            freeze = (
                "\n    for name, p in model.named_parameters():\n        p.requires_grad_(not "
                f"name.startswith({frozen!r}))"
                if frozen
                else ""
            )
            (self._folder / f"{name}.py").write_text(
                "import gpt\ndef small():\n    model = gpt.Gpt(gpt.Config(vocabulary=gpt.load_tokens()[1], "
                f"{self._size})){freeze}\n    return model\n"
            )
            paths = os.pathsep.join([str(self._folder), environment()["PYTHONPATH"]])
            command = [
                sys.executable, "-m", "shardplan.tracer", f"{name}:small", "--batch", "2", "--seq", "32", "--dtype",
                "float32", "-o", str(path),
            ]
            done = subprocess.run(
                command, cwd=self._folder, env={**environment(), "PYTHONPATH": paths}, capture_output=True, text=True,
                timeout=300,
            )
            assert done.returncode == 0, done.stderr
        return path

    def plan(self, ranks: int, *flags: str, frozen: str = "", policy: str = "fsdp2") -> pathlib.Path:
        key = (ranks, *flags, frozen, policy)
        if key not in self._made:
            cluster = json.loads((ROOT / "examples" / "train_gpt" / "cluster.json").read_text())
            cluster["ranks"] = cluster["ranks_per_node"] = ranks
            cluster_path = self._folder / f"cluster{ranks}.json"
            cluster_path.write_text(json.dumps(cluster))
            path = self._folder / f"plan{len(self._made)}.json"
            self._run(
                "plan", self.trace(frozen), "--cluster", cluster_path, "--policy", policy, "--unit", "blocks.*", "-q",
                "-o", path, *flags,
            )
            self._made[key] = path
        return self._made[key]
