# SPDX-License-Identifier: Apache-2.0
"""Versions, requirements and the page of the wheels: the provider of dynamic metadata of pyproject.toml and
executor/pyproject.toml.

    shardplan 0.3.0                    of = "core": for any Python, without torch
    shardplan-torch 0.3.0+torch2.15    of = "adapter": requires shardplan==0.3.0 and its module's torch==2.15.*
    shardplan-torch 0.3.0              of an interpreter without torch (an sdist): requires the supported range
"""

from __future__ import annotations

import importlib.metadata
import pathlib
import re
from collections.abc import Mapping
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
# A block of code, a piece of code, or a link: what is code stays as it is.
_CODE_OR_LINK = re.compile(
    r"```.*?```|`[^`\n]*`|(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)", re.DOTALL
)


def project_version(text: str) -> str:
    """The version in CMakeLists.txt, its one place."""
    return re.search(r"^project\(shardplan VERSION ([0-9.]+)", text, re.MULTILINE)[1]


def repository(citation: str) -> str | None:
    """The address of the sources in CITATION.cff, its one place; None while it names none."""
    found = re.search(r"^repository-code: *[\"']?(https://[^\s\"']+)", citation, re.MULTILINE)
    return found[1].rstrip("/") if found else None


def _is_relative(target: str | None) -> bool:
    return target is not None and not re.match(r"#|[a-z]+:", target)


def relative_links(page: str) -> list[str]:
    """Targets that need the tree beside the page."""
    return [found["target"] for found in _CODE_OR_LINK.finditer(page) if _is_relative(found["target"])]


def index_page(readme: str, address: str | None, version: str) -> str:
    """README.md as a package index shows it, where no file is beside it: links into the tree lead to the version's tag
    at `address`. Without an address they are text, and pictures of the tree are left out."""

    def absolute(found: re.Match) -> str:
        target, text = found["target"], found["text"]
        if not _is_relative(target):
            return found[0]
        if address is None:
            return "" if found["picture"] else text
        return f"{found['picture']}[{text}]({address}/{'raw' if found['picture'] else 'blob'}/v{version}/{target})"

    return _CODE_OR_LINK.sub(absolute, readme)


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
    """bounds: the supported releases of torch, as [">=LOWEST", "<ABOVE"]. RuntimeError where `release` is none of
    them."""
    own = f"shardplan=={version}"
    if release is None:
        return {"version": version, "dependencies": [own, f"torch{','.join(bounds)}", *others]}
    if not _is_within(release, bounds):
        raise RuntimeError(f"torch {release} is installed, and shardplan is built with torch{','.join(bounds)}")
    return {"version": f"{version}+torch{release}", "dependencies": [own, f"torch=={release}.*", *others]}


def dynamic_metadata(settings: Mapping[str, Any], _project: Mapping[str, Any]) -> dict[str, Any]:
    version = project_version((ROOT / "CMakeLists.txt").read_text())
    if settings["of"] == "core":
        address = repository((ROOT / "CITATION.cff").read_text())
        page = index_page((ROOT / "README.md").read_text(), address, version)
        urls = {"Source": address, "Changelog": f"{address}/blob/v{version}/CHANGELOG.md"} if address else {}
        return {"version": version, "readme": {"text": page, "content-type": "text/markdown"}, "urls": urls}
    return adapter(version, torch_release(), settings["torch"], settings["dependencies"])
