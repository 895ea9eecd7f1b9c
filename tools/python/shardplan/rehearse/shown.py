# SPDX-License-Identifier: Apache-2.0
"""A race as wrong numbers: the command with all its ranks and with numbers, on the device in software, in the host's
order and in an order that the race allows."""

from __future__ import annotations

import difflib
import os
import subprocess
import tempfile
from pathlib import Path

from shardplan.command import printable_name

from .device import Device, device_folder, environment_on, with_links

_MOST_LINES = 20


class CannotShow(Exception):
    """The command does not run with numbers."""


def _lines(device: Device, devices: int, mode: str, folder: Path, command: list[str], what: str) -> list[str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # sums do not depend on them
        **environment_on(device, devices, mode, folder),
    }
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    if done.returncode != 0:
        said = (done.stderr if done.stderr.strip() else done.stdout).decode(errors="replace").splitlines()
        last = "\n".join(printable_name(line) for line in said[-8:])
        raise CannotShow(f"the command ends with exit code {done.returncode} {what}; its last lines:\n{last}")
    return done.stdout.decode(errors="replace").splitlines()


def _differing(of_the_host: list[str], again: list[str], other: list[str]) -> list[tuple[str, str]]:
    """Lines in the two orders. A line that differs between two runs in one order (a time, an address) says nothing."""
    if len(of_the_host) == len(again):
        stable = [line == same for line, same in zip(of_the_host, again, strict=True)]
        of_the_host = [line for line, is_stable in zip(of_the_host, stable, strict=True) if is_stable]
        if len(other) == len(stable):
            other = [line for line, is_stable in zip(other, stable, strict=True) if is_stable]
    return [
        ("host" if line[0] == "-" else "race", line[1:])
        for line in difflib.unified_diff(of_the_host, other, n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]


def shown(race: int, mode: str, device: Device, devices: int | None, command: list[str]) -> str:
    """The lines of the output that differ. mode: "late:5". Raises CannotShow."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = with_links(device_folder(), Path(scratch))
        of_the_host, again = (
            _lines(device, devices or 8, "serial", folder, command, "in the order of its host") for _ in range(2)
        )
        other = _lines(device, devices or 8, mode, folder, command, f"in the order of race {race}")
    differing = _differing(of_the_host, again, other)
    if not differing:
        return f"race {race} in its order: no line of the output differs. Let the script print what it reads there"
    rows = [f"  {order}  {printable_name(line)}" for order, line in differing[:_MOST_LINES]]
    rest = len(differing) - len(rows)
    head = f"race {race} in its order: lines of the output in the order of the host, and in one that the race allows"
    return "\n".join([head, *rows, *([f"  and {rest} more"] if rest > 0 else [])])
