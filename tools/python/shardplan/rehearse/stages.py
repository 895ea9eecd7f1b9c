# SPDX-License-Identifier: Apache-2.0
"""The other stages of a pipeline: the time of a step is that of all of them, joined."""

from __future__ import annotations

from collections.abc import Callable

from shardplan.command import printable_name

from . import recording, text
from .device import Device
from .launch import RECORDED, Outcome, Rehearsal

_MOST_STAGES = 64


class Stages:
    """rows: of the table of their memory."""

    def __init__(self, rehearsal: Rehearsal, device: Device, command: list[str], say: Callable[[str], None]) -> None:
        self._rehearsal, self._device, self._command, self._say = rehearsal, device, command, say
        self.rows: list[tuple[str, ...]] = []

    def beside(self, rank: int, outcome: Outcome) -> list[str]:
        """Recordings of the ranks that the rank depends on, and those on. Raises recording.NoTime where one of them is
        not to be had, and NeedsTooMuch."""
        seen, waiting, paths = {rank}, self._partners(outcome), []
        while waiting:
            other = waiting.pop(0)
            if other in seen:
                continue
            seen.add(other)
            if len(seen) > _MOST_STAGES:
                raise recording.NoTime(f"more than {_MOST_STAGES} ranks wait for each other")
            self._say(f"rank {other} is rehearsed, too: it is another stage of the pipeline")
            found = self._rehearsal.of_other_rank(other)
            paths.append(self._written(other, found))
            waiting += self._partners(found)
        return paths

    def _partners(self, outcome: Outcome) -> list[int]:
        return recording.partners(outcome.folder / RECORDED, outcome.told)

    def _written(self, rank: int, outcome: Outcome) -> str:
        result, raw = outcome.told.get("result"), outcome.folder / RECORDED
        if result is None or not raw.exists() or result["error"] is not None:
            raise recording.NoTime(
                f"rank {rank}, another stage of the pipeline, ended early (exit code {outcome.code}); its last lines:\n"
                f"{printable_name(outcome.output)}"
            )
        self.rows.append(text.stage_row(result))
        path = str(outcome.folder / "recording.json.gz")
        recording.write(path, raw, outcome.told, self._device, self._command)
        return path
