# SPDX-License-Identifier: Apache-2.0
"""The run that this process belongs to: what was asked for, and the folder in which its processes tell the command what
became of it."""

from __future__ import annotations

import json
import os
import sys
from typing import NoReturn

_VARIABLE = "SHARDPLAN_REHEARSE"  # JSON
EXIT_NEEDS = 86  # another rank has to be rehearsed first: NEEDS says which


class Run:
    """Fields of the JSON that `shardplan rehearse` puts into the environment (launch.py beside it)."""

    def __init__(self) -> None:
        asked = json.loads(os.environ[_VARIABLE])
        self.folder: str = asked["folder"]  # of this run of this rank
        self.messages: str = asked["messages"]  # shared by the runs of all ranks
        self.rank: int = asked["rank"]
        self.gpus: int | None = asked["gpus"]  # None: as many as the launcher starts
        self.gpus_per_node: int = asked["gpus_per_node"]
        self.devices_alone: int = asked["devices_alone"]  # that a process without a launcher sees
        self.steps: int = asked["steps"]
        self.context_bytes: int = asked["context_bytes"]
        self.nccl_bytes: int = asked["nccl_bytes"]  # of a communicator of more than one rank
        self.history: bool = asked["history"]
        self.snapshot: str | None = asked["snapshot"]
        self.record: str | None = asked["record"]  # where the device writes what is issued to it
        self.until: str | None = asked["until"]  # the message that this run is for
        # Idle seconds of a process for the next run; 0: none.
        self.keep = int(os.environ.get("SHARDPLAN_REHEARSE_KEEP", "0"))
        self.library_folder: str = asked["library_folder"]

    def local_rank(self) -> int:
        return self.rank % self.gpus_per_node

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def tell(self, name: str, document: object) -> None:
        """Writes NAME.json into the folder, whole."""
        path = self.path(name + ".json")
        with open(path + ".part", "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump(document, file)
        os.replace(path + ".part", path)

    def told(self, name: str) -> object | None:
        try:
            with open(self.path(name + ".json"), encoding="utf-8") as file:
                return json.load(file)
        except (OSError, ValueError):
            return None


_run: Run | None = None


def the_run() -> Run:
    global _run
    if _run is None:
        _run = Run()
    return _run


def stop(code: int) -> NoReturn:
    """Ends this process and the processes that it started, without its exit handlers."""
    if (checkpoints := sys.modules.get(f"{__package__}.checkpoints")) is not None:
        checkpoints.take_away_empty_folders()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
    multiprocessing = sys.modules.get("multiprocessing")
    for child in multiprocessing.active_children() if multiprocessing else ():
        child.kill()
    os._exit(code)


def refuse(code: int, message: str) -> NoReturn:
    """Ends the rehearsal: the command prints the message and ends with the code."""
    the_run().tell("refused", {"code": code, "message": message})
    stop(code)
