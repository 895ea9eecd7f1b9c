# SPDX-License-Identifier: Apache-2.0
"""The Python package, the command and the compiled module are of one version. A path may hold two: what is said
then."""

from __future__ import annotations

import errno
import functools
import importlib.metadata
import platform
import subprocess
from pathlib import Path

from shardplan import __version__
from shardplan.installing import in_checkout

_HERE = Path(__file__).resolve().parent


def why_not(what: str, version: str, distribution: str = "shardplan") -> str:
    """Why what has this version does not go with this package. "": it does."""
    if version == __version__:
        return ""
    install = (
        "build again (tools/build dev)"
        if in_checkout()
        else f"pip install --force-reinstall '{distribution}=={__version__}'"
    )
    return (
        f"{what} is of shardplan {version}, and the Python package in {_HERE} is {__version__}: {install}, or take "
        "the other one off PATH and PYTHONPATH"
    )


@functools.cache
def why_not_program(program: str) -> str:
    """Why the command `program` cannot be called by this package. "": it can."""
    try:
        done = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        machine = (
            f": it is for another processor than this {platform.machine()}; pip install --force-reinstall shardplan"
            if error.errno == errno.ENOEXEC
            else ""
        )
        return f"cannot start {program}: {error.strerror}{machine}"
    if done.returncode != 0:
        return (
            f"{program} --version ends with {done.returncode}: "
            f"{(done.stderr.strip().splitlines() or ['it says nothing'])[-1]}"
        )
    return why_not(program, done.stdout.strip())


def installed() -> list[tuple[str, str, str]]:
    """(distribution, version, folder) of shardplan and shardplan-torch on sys.path, each once."""
    found = dict.fromkeys(
        (item.metadata["Name"].lower().replace("_", "-"), item.version, str(item.locate_file("")))
        for item in importlib.metadata.distributions()
        if (item.metadata["Name"] or "").lower().replace("_", "-") in ("shardplan", "shardplan-torch")
    )
    return list(found)
