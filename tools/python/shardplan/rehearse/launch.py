# SPDX-License-Identifier: Apache-2.0
"""Runs the user's command as it is, for one rank, on the device in software. Its processes tell what became of it in a
folder (site/shardplan_rehearsal/run.py)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from .device import Device, environment_on, first

RECORDED = "recorded"  # in the folder of a run
_SITE = Path(__file__).resolve().parent / "site"
_GPUS_PER_NODE = 8
_END_SECONDS = 10  # that a command which is ended may take
_MOST_RUNS = 64  # of ranks that have to come first


class NeedsTooMuch(Exception):
    """Ranks wait for each other's objects without an end."""


@dataclasses.dataclass(frozen=True)
class Asked:
    words: list[str]
    device: Device
    library_folder: Path
    gpus: int | None
    gpus_per_node: int | None
    steps: int
    history: bool
    snapshot: str | None
    routing: tuple[float, ...] | None  # shares of the experts
    record: bool
    keep: int  # a warm process for the next run, so many idle seconds; 0: none


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int  # of the user's command; negative: the signal that ended it
    told: Mapping[str, dict]  # "result", "refused", "torch", "no_torch", "needs", "sent"
    folder: Path | None = None  # of the run
    output: str = ""  # of a rank that is rehearsed for another: its last lines


@dataclasses.dataclass(frozen=True)
class Purpose:
    """Why a rank is rehearsed."""

    is_asked_for: bool  # its output is the user's, and all that was asked for is written
    until: str | None = None  # it ends with this message, which another rank receives

    @property
    def is_recorded(self) -> bool:
        return self.until is None


def environment_of(asked: Asked, rank: int, folder: Path, messages: Path, purpose: Purpose) -> dict[str, str]:
    per_node = min(asked.gpus_per_node or _GPUS_PER_NODE, asked.gpus or 1 << 20)
    run = {
        "folder": str(folder),
        "messages": str(messages),
        "rank": rank,
        "gpus": asked.gpus,
        "gpus_per_node": per_node,
        "devices_alone": per_node if asked.gpus or asked.gpus_per_node else 1,
        "steps": asked.steps,
        "context_bytes": asked.device.context_bytes,
        "nccl_bytes": asked.device.nccl_bytes,
        "history": asked.history and purpose.is_asked_for,
        "snapshot": asked.snapshot if purpose.is_asked_for else None,
        "record": str(folder / RECORDED) if asked.record and purpose.is_recorded else None,
        "until": purpose.until,
        "library_folder": str(asked.library_folder),
    }
    environment = dict(os.environ)
    for name in (
        "CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SHARDPLAN_REHEARSE_WORKER",
        "SHARDPLAN_DEVICE_ROUTING", "SHARDPLAN_DEVICE_POISON",
    ):
        environment.pop(name, None)
    environment.setdefault("WANDB_MODE", "disabled")
    return {
        **environment,
        **environment_on(asked.device, per_node, "null", asked.library_folder),
        "PYTHONPATH": first(_SITE, environment.get("PYTHONPATH")),
        "SHARDPLAN_REHEARSE": json.dumps(run),
        # Nobody of these would find a peer.
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    }


class Rehearsal:
    """The runs of one command: of the rank that is asked for, before it of those whose objects it receives, and behind
    it of the other stages of a pipeline."""

    def __init__(self, asked: Asked, scratch: Path, say: Callable[[str], None]) -> None:
        self._asked, self._scratch, self._say = asked, scratch, say
        self._messages = scratch / "messages"
        self._messages.mkdir()
        self._runs = 0

    def of_rank(self, rank: int) -> Outcome:
        """The run of the rank that is asked for. Raises NeedsTooMuch."""
        return self._of(rank, Purpose(is_asked_for=True), ())

    def of_other_rank(self, rank: int) -> Outcome:
        """Recorded, too; its own output is kept. Raises NeedsTooMuch."""
        return self._of(rank, Purpose(is_asked_for=False), ())

    def _of(self, rank: int, purpose: Purpose, waiting: tuple[int, ...]) -> Outcome:
        while True:
            outcome = self._run(rank, purpose)
            needs = outcome.told.get("needs")
            if needs is None:
                return outcome
            sender = needs["rank"]
            if sender in (*waiting, rank) or self._runs > _MOST_RUNS:
                chain = ", ".join(str(one) for one in (*waiting, rank, sender))
                raise NeedsTooMuch(
                    f"ranks wait for each other's objects (found the chain {chain}; expected one that ends): no rank "
                    "can be rehearsed first"
                )
            self._say(f"rank {sender} is rehearsed first: rank {rank} receives an object of it")
            first = self._of(sender, Purpose(is_asked_for=False, until=needs["message"]), (*waiting, rank))
            if "sent" not in first.told and not (self._messages / needs["message"]).exists():
                raise NeedsTooMuch(
                    f"rank {sender} ended without sending what rank {rank} receives of it (exit code {first.code}); "
                    f"its last lines:\n{first.output}"
                )

    def _run(self, rank: int, purpose: Purpose) -> Outcome:
        self._runs += 1
        folder = self._scratch / f"run{self._runs}"
        folder.mkdir()
        log = folder / "output"
        environment = environment_of(self._asked, rank, folder, self._messages, purpose)
        if self._asked.keep:
            environment["SHARDPLAN_REHEARSE_KEEP"] = str(self._asked.keep)
        if self._asked.routing is not None:
            shares = self._scratch / "routing"
            shares.write_text("\n".join(map(repr, self._asked.routing)) + "\n")
            environment["SHARDPLAN_DEVICE_ROUTING"] = str(shares)
        is_quiet = not purpose.is_asked_for
        with open(log if is_quiet else os.devnull, "wb") as output:
            quiet = {"stdout": output, "stderr": subprocess.STDOUT} if is_quiet else {}
            code = _finished(subprocess.Popen(self._asked.words, env=environment, start_new_session=True, **quiet))
        told = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
        last = log.read_text(errors="replace").splitlines()[-8:] if is_quiet else []
        return Outcome(code, told, folder, "\n".join(last))


def _finished(process: subprocess.Popen) -> int:
    """Its exit code. It leads a session: what it has started ends with it, and with this command."""
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
