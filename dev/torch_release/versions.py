# SPDX-License-Identifier: Apache-2.0
"""Which torch is checked, what its virtual environment holds, and which planned release is nearest."""

from __future__ import annotations

import re
import subprocess
import sys

_AVAILABLE = re.compile(r"^Available versions: (.*)$", re.MULTILINE)
# They follow torch's CUDA: torch pins cuda-toolkit, and cuda-toolkit pins these.
_OF_TORCH = ("torch", "nvidia-cuda-crt", "nvidia-cuda-cccl")
CUDA = "cuda-toolkit[crt,cccl]"
LISTS = ("requirements.txt", "requirements-tests.txt")  # in tools/


class BadVersion(Exception):
    """The command line names a torch that cannot be checked."""


class EnvironmentProblem(Exception):
    """No package index, or no virtual environment."""


def key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def release(version: str) -> str:
    """"2.15" of "2.15.0+cu130"."""
    return ".".join(version.split(".")[:2])


def nearest(version: str, known: list[str]) -> str:
    """The newest known release that is not newer than the version; the oldest where all are newer."""
    not_newer = [name for name in known if key(name) <= key(release(version))]
    return max(not_newer, key=key) if not_newer else min(known, key=key)


def listed(output: str) -> list[str]:
    """Releases that `pip index versions torch` lists, newest first."""
    found = _AVAILABLE.search(output)
    return [version.strip() for version in found[1].split(",")] if found else []


def on_index() -> list[str]:
    """The versions of torch that the package index has, newest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check", "torch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    versions = listed(done.stdout)
    if not versions:
        raise EnvironmentProblem(
            f"the package index lists no torch: {(done.stderr.strip().splitlines() or ['pip said nothing'])[-1]}"
        )
    return versions


def check(version: str, available: list[str], oldest: str) -> None:
    """Raises BadVersion unless the index has this version, and its release is planned or newer than one that is."""
    usable = [name for name in available if re.fullmatch(r"\d+(\.\d+)+", name) and key(name) >= key(oldest)]
    if version in usable:
        return
    why = (
        f"is older than the oldest release that is planned, {oldest}"
        if version in available
        else "is not on the package index"
    )
    raise BadVersion(f"torch {version} {why}; known: {', '.join(usable)}")


def requirements(text: str, version: str) -> str:
    """The lists of tools/ with this torch, and the CUDA headers that go with it."""
    others = [
        line for line in text.splitlines() if line and not line.startswith("#") and line.split("==")[0] not in _OF_TORCH
    ]
    return "\n".join([*others, f"torch=={version}", CUDA]) + "\n"
