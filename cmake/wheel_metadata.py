# SPDX-License-Identifier: Apache-2.0
"""Versions and requirements of the wheels: the provider of dynamic metadata of pyproject.toml and executor/pyproject.toml.

    shardplan 0.3.0                    of = "core": for any Python, without torch
    shardplan-torch 0.3.0+torch2.15    of = "adapter": requires shardplan==0.3.0 and torch==2.15.*, which its module is built with
    shardplan-torch 0.3.0              of an interpreter without torch (an sdist): requires the supported range
"""

from __future__ import annotations

import importlib.metadata
import pathlib
import re
from collections.abc import Mapping
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]


def project_version(text: str) -> str:
    """Of CMakeLists.txt, its one place."""
    return re.search(r"^project\(shardplan VERSION ([0-9.]+)", text, re.MULTILINE)[1]


def torch_release() -> str | None:
    """"2.15" of the interpreter that builds."""
    try:
        return ".".join(importlib.metadata.version("torch").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_within(release: str, bounds: list[str]) -> bool:
    def key(version: str) -> list[int]:
        return [int(part) for part in version.split(".")]

    lowest, above = (bound.lstrip("<>=") for bound in bounds)
    return key(lowest) <= key(release) < key(above)


def adapter(version: str, release: str | None, bounds: list[str], others: list[str]) -> dict[str, Any]:
    """bounds: the supported releases of torch, as [">=LOWEST", "<ABOVE"]. RuntimeError where `release` is none of them."""
    own = f"shardplan=={version}"
    if release is None:
        return {"version": version, "dependencies": [own, f"torch{','.join(bounds)}", *others]}
    if not _is_within(release, bounds):
        raise RuntimeError(f"torch {release} is installed, and shardplan is built with torch{','.join(bounds)}")
    return {"version": f"{version}+torch{release}", "dependencies": [own, f"torch=={release}.*", *others]}


def dynamic_metadata(settings: Mapping[str, Any], _project: Mapping[str, Any]) -> dict[str, Any]:
    version = project_version((ROOT / "CMakeLists.txt").read_text())
    if settings["of"] == "core":
        return {"version": version}
    return adapter(version, torch_release(), settings["torch"], settings["dependencies"])
