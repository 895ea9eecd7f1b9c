# SPDX-License-Identifier: Apache-2.0
"""Plans that `auto` made, on disk: a restart begins with the plan."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
from typing import Any

import torch

from shardplan.building import cache_folder
from shardplan.files import CannotWrite, write_text

from .._job.native import native


def default_folder() -> pathlib.Path:
    """$SHARDPLAN_PLANS, else plans in the cache folder."""
    if given := os.environ.get("SHARDPLAN_PLANS"):
        return pathlib.Path(given)
    return cache_folder() / "plans"


class PlanStore:
    """One folder; None: nothing is kept."""

    def __init__(self, folder: str | os.PathLike | None) -> None:
        self._folder = None if folder is None else pathlib.Path(folder)

    def path(self, model: str, facts: dict[str, Any]) -> pathlib.Path | None:
        """The file of the plan of these facts, which are all that it is made of, and who makes it."""
        if self._folder is None:
            return None
        whole = {"shardplan": native.__version__, "torch": torch.__version__, **facts}
        digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
        return self._folder / f"{model}-{digest[:16]}.plan.json"

    @staticmethod
    def read(path: pathlib.Path | None) -> str | None:
        """None where there is none that this version reads."""
        if path is None:
            return None
        try:
            native.read_plan(str(path))
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None

    @staticmethod
    def write(path: pathlib.Path | None, text: str) -> bool:
        """Is it kept? A folder that cannot be written keeps nothing."""
        if path is None:
            return False
        with contextlib.suppress(OSError, CannotWrite):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
            return True
        return False
