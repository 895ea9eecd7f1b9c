# SPDX-License-Identifier: Apache-2.0
"""The command `shardplan doctor`.

Each check runs in a process of its own: a library that crashes or hangs while it loads is a finding, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from shardplan import building
from shardplan.command import EXIT_ENVIRONMENT, ArgumentParser, NoCommand, built_command, printable_name
from shardplan.doctor import checks
from shardplan.doctor.checks import CHECKS, Check, Finding
from shardplan.installing import has_torch, how_to_install

_DESCRIPTION = """\
Say what is installed, which backends work on this machine, and what to do about those that do not."""
_EPILOG = """\
exit codes: 0 everything that planning, simulating and (where torch is installed) training on CPU ranks needs works, \
2 usage, 4 something of it does
not"""
_MARKS = {"works": "ok  ", "later": "--  ", "missing": "--  ", "broken": "FAIL"}


def parser() -> argparse.ArgumentParser:
    result = ArgumentParser(
        prog="shardplan doctor",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--timeout", type=float, default=60, metavar="S", help="for each check (default: 60)")
    result.add_argument(
        "--build",
        action="store_true",
        help="compile shardplan.torch for the torch at hand first, where that is not done yet",
    )
    return result


def main() -> int:
    options = parser().parse_args()
    bad, torch = [], has_torch()
    not_built = _build(torch) if options.build else None
    for check in CHECKS:
        if check.of_torch and not torch:
            continue
        finding = not_built if not_built and check.name == "shardplan.torch" else _found(check, options.timeout)
        print(f"{_MARKS[finding.state]}  {check.name:<16} {printable_name(finding.found)}")
        if finding.advice:
            print(f"      {'':<16} {printable_name(finding.advice)}")
        sys.stdout.flush()
        if check.needed and finding.state not in ("works", "later") and (torch or finding.state == "broken"):
            bad.append(check.name)
    if bad:
        print(f"\nnot ready: {', '.join(bad)}")
    elif not torch:
        print("\nready to plan and simulate; torch is not installed: no traces, no training")
    return EXIT_ENVIRONMENT if bad or (options.build and not torch) else 0


def _build(torch: bool) -> Finding | None:
    """The finding of a build that failed."""
    if not torch:
        print(f"shardplan doctor: there is no torch to compile for: {how_to_install('torch')}", file=sys.stderr)
    elif building.comes_with_sources() and importlib.util.find_spec("_shardplan") is None:
        try:
            building.built()
        except ImportError as error:  # torch's own, too
            return Finding("broken", str(error))
    return None


def _found(check: Check, timeout: float) -> Finding:
    """Runs the check in a process, which prints its finding as its last line."""
    if check.name == "programs":
        return _programs()
    command = [sys.executable, "-m", "shardplan.doctor.checks", check.name]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return Finding("broken", f"did not end within {timeout:g} s", check.advice)
    finally:
        if process.poll() is None:  # and the ranks that it started
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for line in reversed(said.splitlines()):
        if line.startswith(checks.MARK):
            return Finding(**json.loads(line.removeprefix(checks.MARK)))
    why = errors.strip().splitlines()[-1] if errors.strip() else "it said nothing"
    return Finding("broken", f"ended with code {process.returncode}: {why}", check.advice)


def _programs() -> Finding:
    try:
        folder = Path(built_command("doctor")).resolve().parent
    except NoCommand as error:
        return Finding("broken", str(error), CHECKS[0].advice)
    there = [name for name in ("shardplan", "shardplan-run") if (folder / name).exists()]
    wanted = set() if building.comes_with_sources() else {"shardplan-run"}
    missing = sorted(wanted - set(there))
    if missing:
        return Finding(
            "missing",
            f"{', '.join(there)} in {folder}; not built: {', '.join(missing)}",
            f"without LibTorch plans are made, verified and simulated, and not replayed: {checks.TRAINS}",
        )
    return Finding("works", f"{', '.join(there)} in {folder}")
