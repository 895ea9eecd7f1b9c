# SPDX-License-Identifier: Apache-2.0
"""One configuration: trace, plan, simulate."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import stat
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

from shardplan import files
from shardplan.clusters import document_of
from shardplan.command import NoCommand
from shardplan.sweep.configurations import Configuration
from shardplan.titan import variants

_GIB = 1 << 30
_CLUSTER = "h100_sxm_8"  # the default of `shardplan plan`


class Evaluator:
    """Asks `shardplan evaluate`, a process for each thread. A trace is made once for each source, batch and sequence,
    and of a torchtitan job for each number of ranks and values of its keys."""

    def __init__(self, program: str, folder: str, trace_flags: list[str], plan_flags: list[str], budget: str | None):
        self._program, self._folder = program, Path(folder)
        self._trace_flags, self._plan_flags = trace_flags, plan_flags
        self._budget = ["--memory-budget", budget] if budget else []
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()
        self._own = threading.local()
        self._started: list[subprocess.Popen] = []

    def __call__(self, configuration: Configuration) -> dict[str, object]:
        try:
            answer = self._ask(
                [*self._trace(configuration), *configuration.plan_flags(), *self._plan_flags, *self._budget]
            )
        except _Failed as error:
            return {"error": str(error)}
        return {"error": " ".join(answer["error"].split())[:600]} if "error" in answer else self._results(answer)

    def close(self) -> None:
        for process in self._started:
            process.stdin.close()
            process.wait()
            process.stdout.close()

    def _ask(self, question: list[str]) -> dict:
        process = getattr(self._own, "process", None)
        if process is None:
            process = self._own.process = subprocess.Popen(
                [self._program, "evaluate"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            with self._guard:
                self._started.append(process)
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        self._own.process = None
        raise _Failed(f"evaluate: {_last(process.stderr.read()) or f'exit code {process.wait()}'}")

    def _results(self, answer: dict) -> dict[str, object]:
        return {
            "step_ms": f"{answer['step_ns'] / 1e6:.3f}",
            "tokens_per_second": answer["tokens_per_step"] * 10**9 // max(answer["step_ns"], 1),
            "tokens_per_second_per_rank": answer["tokens_per_second_per_rank"],
            "utilization_percent": f"{answer['model_flops_utilization_ppm'] / 1e4:.2f}",
            "exposed_ms": f"{answer['exposed_communication_ns'] / 1e6:.3f}",
            "peak_gib": f"{answer['peak_bytes'] / _GIB:.3f}",
            "reserved_gib": f"{answer['reserved_bytes'] / _GIB:.3f}",
            "needed_gib": f"{answer['needed_bytes'] / _GIB:.3f}",
            "cache_releases": answer["cache_releases"],
            "fits": "yes" if answer["fits"] else "no",
            "budget_gib": answer["budget_bytes"] / _GIB if answer["budget_bytes"] is not None else None,
            "why": answer["no_ranks_fit"],
        }

    def _trace(self, configuration: Configuration) -> list[str]:
        """Arguments of `shardplan plan` for its trace."""
        source = configuration["source"]
        if variants.is_job(source):
            return self._of_job(configuration)
        if _is_name(source):
            if configuration.get("batch") not in ("", "1") or self._trace_flags:
                raise _Failed(
                    f"the traces of {source} that are shipped have one sample a step, and no flags; trace its config"
                )
            return [source, *(["--seq", configuration["seq"]] if configuration.get("seq") else [])]
        if (
            not configuration.get("batch")
            and not configuration.get("seq")
            and source.endswith((".json", ".json.gz"))
            and _is_trace(source)
        ):
            return [source]
        shape = [
            flag for axis in ("batch", "seq") if configuration.get(axis) for flag in (f"--{axis}", configuration[axis])
        ]
        path = self._folder / f"{self._name(source, shape)}.trace.json"
        self._once(path, lambda: self._run("trace", source, *shape, *self._trace_flags, "-q", "-o", str(path)))
        return [str(path)]

    def _of_job(self, configuration: Configuration) -> list[str]:
        """... of a torchtitan job, whose model is cut for its ranks."""
        try:
            job = variants.job_of(configuration["source"])
            ranks = configuration.get("ranks") or self._ranks(configuration.get("cluster"))
        except (ValueError, NoCommand) as error:
            raise _Failed(str(error)) from error
        shape = [
            (key, configuration.get(axis))
            for axis, key in (("batch", "training.local_batch_size"), ("seq", "training.seq_len"))
            if configuration.get(axis)
        ]
        values = [*shape, *configuration.job_values()]
        folder = self._folder / self._name(job, values, ranks)

        def make() -> None:
            options = ["--cluster", configuration.get("cluster") or _CLUSTER, "--ranks", ranks, "--trace-only"]
            made = variants.make([*job, *self._trace_flags], values, options, folder)
            if made.exit_code != 0:
                raise _Failed(made.why)

        self._once(folder, make)
        return [str(folder / "trace.json"), "--strategy", str(folder / "strategy.json")]

    def _ranks(self, cluster: str) -> str:
        _, answer = document_of(cluster or _CLUSTER, None, "sweep")
        return str(json.loads(answer["text"])["ranks"])

    def _name(self, *of: object) -> str:
        return hashlib.sha256(repr((of, self._trace_flags)).encode()).hexdigest()[:20]

    def _once(self, path: Path, make: Callable[[], None]) -> None:
        """make() makes what is at the path, or fails once for all."""
        with self._guard:
            lock = self._locks.setdefault(path.name, threading.Lock())
        with lock:
            failed, made = path.with_suffix(".failed"), path.with_suffix(".made")
            if failed.exists():
                raise _Failed(failed.read_text())
            if made.exists():
                return
            try:
                make()
            except _Failed as error:
                files.write_text(failed, str(error))
                raise
            made.touch()

    def _run(self, *arguments: str) -> None:
        environment = os.environ | {"SHARDPLAN_PYTHON": sys.executable}
        done = subprocess.run([self._program, *arguments], capture_output=True, text=True, env=environment, check=False)
        if done.returncode != 0:
            raise _Failed(f"{arguments[0]}: {_last(done.stderr) or f'exit code {done.returncode}'}")


def _last(text: str) -> str:
    """The end of what a command said, in one line."""
    return " ".join(line for line in text.splitlines() if line.strip())[-400:]


class _Failed(Exception):
    """A command refused the configuration."""


def _is_name(source: str) -> bool:
    """Whether it may be a model whose traces are shipped: neither a file nor package.module:callable."""
    return ":" not in source and not source.endswith((".json", ".json.gz")) and not os.path.exists(source)


def _is_trace(path: str) -> bool:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with gzip.open(path, "rt", encoding="utf-8") if path.endswith(".gz") else open(path, encoding="utf-8") as file:
            return '"shardplan.trace/' in file.read(200)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error):
        return False
