# SPDX-License-Identifier: Apache-2.0
"""Plans for the adapter's cases, made by the commands a user types, each once a session."""

from __future__ import annotations

import pathlib
import sys

from adapter_cases import BATCH, CASES, ROOT, SEQUENCE, Case

sys.path.insert(0, str(ROOT / "examples" / "train_gpt"))

import make_plan  # noqa: E402

TESTS = pathlib.Path(__file__).resolve().parent


def knobs(case: Case) -> list[str]:
    flags = ["--policy", "fsdp2", "--optimizer", "adamw" if case.optimizer == "adamw" else "sgdm"]
    for unit in case.units or ("",):
        flags += ["--unit", unit]
    if case.reshard_after_forward is not None:
        flags += ["--reshard-after-forward", str(case.reshard_after_forward).lower()]
    for flag, value in (("--param-dtype", case.param_dtype), ("--reduce-dtype", case.reduce_dtype)):
        if value:
            flags += [flag, value]
    if case.forward_prefetch:
        flags += ["--forward-prefetch", str(case.forward_prefetch)]
    return flags


class PlanShop:
    """plan(case name, ranks) -> path; traces and plans are kept."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._traces: dict[tuple, pathlib.Path] = {}

    def _trace(self, case: Case) -> pathlib.Path:
        key = (case.config, case.frozen)
        if key not in self._traces:
            folder = self._folder / f"trace{len(self._traces)}"
            folder.mkdir(parents=True)
            self._traces[key] = make_plan.make_trace(
                folder, f"adapter_models:{case.name}", TESTS, batch=BATCH, sequence=SEQUENCE
            )
        return self._traces[key]

    def plan(self, name: str, ranks: int, release: str | None = None) -> str:
        """release: of PyTorch; None: the installed one."""
        case = CASES[name]
        path = self._folder / f"{name}_{ranks}{f'_of_{release}' if release else ''}.json"
        if not path.exists():
            of_release = ["--pytorch", release] if release else []
            make_plan.make_plan(self._folder, self._trace(case), ranks, path.stem, *knobs(case), *of_release)
        return str(path)
