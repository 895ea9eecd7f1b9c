# SPDX-License-Identifier: Apache-2.0
"""Plans of resharding (docs/reference/reshard-format.md) from Python: made by the command, executed on bytes in
memory."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

from shardplan.files import scratch_folder, write_text

Piece = tuple[str, int, int, int, int, int]  # tensor, source rank, target rank, source offset, target offset, bytes


class ReshardError(Exception):
    """The command refused a layout, or could not be run."""


def plan(program: str | Path, source: dict, target: dict) -> dict:
    """The plan from one layout document to another."""
    with scratch_folder() as folder:
        for name, layout in (("source", source), ("target", target)):
            write_text(folder / f"{name}.json", json.dumps({"schema": "shardplan.state_layout/1", **layout}))
        command = [str(program), "reshard", str(folder / "source.json"), str(folder / "target.json"), "-q", "-o", "-"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise ReshardError(f"cannot run {program}: {error.strerror}") from error
    if done.returncode != 0:
        raise ReshardError(done.stderr.strip())
    return json.loads(done.stdout)


def runs(document: dict) -> Iterator[Piece]:
    """Every contiguous run of every copy of every tensor."""
    for group in document["groups"]:
        for tensor in group["tensors"]:
            for copy in group["copies"]:
                yield from _runs_of(tensor, copy)


def _runs_of(tensor: str, copy: dict) -> Iterator[Piece]:
    places = [(copy["source_offset"], copy["target_offset"])]
    for loop in copy.get("loops", []):
        places = [
            (s + i * loop["source_stride"], t + i * loop["target_stride"])
            for s, t in places
            for i in range(loop["count"])
        ]
    for source, target in places:
        yield tensor, copy["source_rank"], copy["target_rank"], source, target, copy["run_bytes"]
