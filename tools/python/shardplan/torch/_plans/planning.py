# SPDX-License-Identifier: Apache-2.0
"""Plans are made by the command, in a process of its own."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sysconfig
import threading
import time
from collections.abc import Sequence
from typing import Any

from shardplan import versions
from shardplan.files import scratch_folder, write_text

from .._job.arguments import PlanError
from .._job.native import native

_LOOK_S = 0.2
_OPTIMIZER = "--optimizer"


def command() -> str:
    """`shardplan`: on the PATH, else of the build that the compiled module is from, else of the environment that the
    package is installed in."""
    built = pathlib.Path(native.__file__).resolve().parents[1] / "bin"
    found = shutil.which("shardplan") or shutil.which(
        "shardplan", path=os.pathsep.join([str(built), sysconfig.get_path("scripts")])
    )
    if found is None:
        raise PlanError("planning needs the command shardplan, which is neither on the PATH nor installed nor built")
    if problem := versions.why_not_program(found):
        raise PlanError(problem)
    return found


def _run(asked: list[str], folder: pathlib.Path, timeout_s: float | None = None) -> tuple[int, str]:
    """Exit code, and what was said on standard error. It is ended when the time is up, or with the interpreter."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    with subprocess.Popen(
        asked, cwd=folder, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        while True:
            try:
                said = process.communicate(timeout=_LOOK_S)[1].strip()
                return process.returncode, said
            except subprocess.TimeoutExpired:
                if not threading.main_thread().is_alive() or (until is not None and time.monotonic() > until):
                    process.terminate()


def make_plan(
    kind: str,
    trace: dict[str, Any],
    strategy: dict[str, Any],
    arguments: Sequence[str] = (),
    cluster: str | None = None,
) -> str:
    """The text of the plan that `shardplan KIND` (plan, optimize) makes. PlanError: its words where there is none.

    cluster: a document; None: `arguments` say which. A trace without Muon's steps gets those of whole matrices where
    they are needed.
    """
    trace = with_muon_steps(trace, strategy, arguments)
    with scratch_folder() as here:
        write_text(here / "trace.json", json.dumps(trace))
        write_text(here / "strategy.json", json.dumps(strategy))
        given = list(arguments)
        if cluster is not None:
            write_text(here / "cluster.json", cluster)
            given += ["--cluster", "cluster.json"]
        asked = [command(), kind, "trace.json", "--strategy", "strategy.json", "-q", "-o", "plan.json", *given]
        code, said = _run(asked, here)
        if code != 0:
            raise PlanError(said)
        return (here / "plan.json").read_text(encoding="utf-8")


def asked_memory(plan: str, timeout_s: float | None = None, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """The output of `shardplan memory --rows` for a plan's text, and under "fits" whether it fits its cluster's device.
    PlanError, in the command's words, if there is none."""
    with scratch_folder() as here:
        write_text(here / "plan.json", plan)
        asked = [command(), "memory", "plan.json", "--reserved", "--no-verify", "--rows", "rows.json", "-q", *arguments]
        code, said = _run(asked, here, timeout_s)
        if not (here / "rows.json").exists():
            raise PlanError(said or f"shardplan memory: exit code {code}")
        return {**json.loads((here / "rows.json").read_text(encoding="utf-8")), "fits": code == 0}


def simulated_report(plan: str) -> dict[str, Any]:
    """The report of `shardplan simulate` for a plan's text. PlanError, in the command's words, if there is none."""
    with scratch_folder() as here:
        write_text(here / "plan.json", plan)
        code, said = _run([command(), "simulate", "plan.json", "--report", "report.json", "-q", "--no-verify"], here)
        if code not in (0, 1) or not (here / "report.json").exists():  # 1: it does not fit its device
            raise PlanError(said or f"shardplan simulate: exit code {code}")
        return json.loads((here / "report.json").read_text(encoding="utf-8"))


def is_muon(optimizer: str) -> bool:
    """optimizer: the value of `--optimizer`, a name and words behind it."""
    return optimizer.split("-")[0] == "muon"


def with_muon_steps(trace: dict[str, Any], strategy: dict[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """The trace itself where it has the steps, or neither the strategy nor the arguments of `shardplan plan` have Muon.
    PlanError: they cannot be recorded."""
    muon = strategy.get("optimizer", {}).get("muon")
    named = arguments[list(arguments).index(_OPTIMIZER) + 1] if _OPTIMIZER in arguments else ""
    if "optimizer_steps" in trace or (muon is None and not is_muon(named)):
        return trace
    from shardplan.tracer.errors import TracerError  # take seconds to import
    from shardplan.tracer.muon_options import options_of_strategy
    from shardplan.tracer.muon_steps import optimizer_steps

    muon = muon or {}
    trains = {entry["fqn"] for entry in trace["parameters"] if entry.get("requires_grad", True)}
    options = options_of_strategy({**muon, "matrices": [fqn for fqn in muon.get("matrices", ()) if fqn in trains]})
    marked = {**trace, "parameters": [dict(entry) for entry in trace["parameters"]]}
    try:
        return {**marked, "optimizer_steps": optimizer_steps(marked, options)}
    except TracerError as error:
        raise PlanError(f"Muon's step cannot be traced: {error}") from error
