"""One configuration: trace, plan, simulate."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from shardplan import files
from shardplan.sweep.configurations import Configuration

_GIB = 1 << 30


class Evaluator:
    """Runs the commands. A trace is made once for each source, batch and sequence."""

    def __init__(self, program: str, folder: str, trace_flags: list[str], plan_flags: list[str], budget_bytes: int | None):
        self._program, self._folder = program, Path(folder)
        self._trace_flags, self._plan_flags = trace_flags, plan_flags
        self._budget = budget_bytes
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    def __call__(self, configuration: Configuration) -> dict[str, object]:
        try:
            trace = self._trace(configuration)
            with tempfile.TemporaryDirectory(dir=self._folder) as own:
                plan = os.path.join(own, "plan.json")
                self._run("plan", trace, *configuration.plan_flags(), *self._plan_flags, "-q", "-o", plan)
                # The planner has verified it.
                report = json.loads(self._run("simulate", plan, "--no-verify", "-q", "--report", "-", allowed=(0, 1)))
        except _Failed as error:
            return {"error": str(error)}
        return self._results(report)

    def _results(self, report: dict) -> dict[str, object]:
        memory = report["memory"]
        outside = {entry["category"]: entry["size_bytes"] for entry in memory["peak_by_category"]}
        needed = memory["peak_bytes"] + outside.get("cuda_context", 0) + outside.get("nccl_buffers", 0)
        fits = memory.get("fits", True) if self._budget is None else needed <= self._budget
        rate = report.get("tokens_per_second_per_rank", 0)
        return {
            "step_ms": f"{report['step_ns'] / 1e6:.3f}",
            "tokens_per_second": rate * report["world_size"],
            "tokens_per_second_per_rank": rate,
            "utilization_percent": f"{report.get('model_flops_utilization_ppm', 0) / 1e4:.2f}",
            "exposed_ms": f"{report['exposed_communication_ns'] / 1e6:.3f}",
            "peak_gib": f"{memory['peak_bytes'] / _GIB:.3f}",
            "needed_gib": f"{needed / _GIB:.3f}",
            "fits": "yes" if fits else "no",
        }

    def _trace(self, configuration: Configuration) -> str:
        source = configuration["source"]
        if not configuration.get("batch") and not configuration.get("seq") and source.endswith(".json") and _is_trace(source):
            return source
        shape = [flag for axis in ("batch", "seq") if configuration.get(axis) for flag in (f"--{axis}", configuration[axis])]
        name = hashlib.sha256(repr((source, shape, self._trace_flags)).encode()).hexdigest()[:20]
        path = self._folder / f"{name}.trace.json"
        with self._guard:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            failed = path.with_suffix(".failed")
            if failed.exists():
                raise _Failed(failed.read_text())
            if not path.exists():
                try:
                    self._run("trace", source, *shape, *self._trace_flags, "-o", str(path))
                except _Failed as error:
                    files.write_text(failed, str(error))
                    raise
        return str(path)

    def _run(self, *arguments: str, allowed: tuple[int, ...] = (0,)) -> str:
        environment = os.environ | {"SHARDPLAN_PYTHON": sys.executable}
        done = subprocess.run([self._program, *arguments], capture_output=True, text=True, env=environment, check=False)
        if done.returncode not in allowed:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise _Failed(f"{arguments[0]}: {' '.join(lines)[-400:] if lines else f'exit code {done.returncode}'}")
        return done.stdout


class _Failed(Exception):
    """A command refused the configuration."""


def _is_trace(path: str) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            return '"shardplan.trace/' in file.read(200)
    except (OSError, UnicodeDecodeError):
        return False
