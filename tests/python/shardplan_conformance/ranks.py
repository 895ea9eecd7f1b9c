# SPDX-License-Identifier: Apache-2.0
"""Ranks to record on: processes with gloo, or one process with torch's fake process group.

They are processes of their own: where FSDP reads parameters that it has freed, the process dies, and is then started
anew.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from shardplan.files import scratch_folder
from shardplan_conformance import processes
from shardplan_conformance.case import Case, CaseError
from shardplan_conformance.meshes import fake_process_group, process_group
from shardplan_conformance.record_case import record_case

_TIMEOUT_SECONDS = 120
_FRAMES = 3  # of a failure's traceback that are shown

MakeCase = Callable[[], Case]


class RecordingFailed(CaseError):
    """PyTorch itself does not run the case: it raises an error, or crashes."""


def record_on_fake_ranks(case: Case, order: list[str]) -> list[str]:
    """Rank 0's log where collectives do nothing. The host's events do not depend on what they move."""
    with fake_process_group(case.ranks):
        return record_case(case, order)


def _record_on_gloo(case: Case, order: list[str], rank: int, store_path: str) -> list[str] | None:
    if rank >= case.ranks:
        return None
    store = dist.FileStore(store_path, case.ranks)
    timeout = timedelta(seconds=_TIMEOUT_SECONDS)
    with process_group(backend="gloo", store=store, rank=rank, world_size=case.ranks, timeout=timeout):
        return record_case(case, order)


def _work(rank: int, fake: bool, connection) -> None:
    torch.set_num_threads(1)
    while (job := connection.recv()) is not None:
        make_case, order, store_path = job
        try:
            case = make_case()
            run = record_on_fake_ranks(case, order) if fake else _record_on_gloo(case, order, rank, store_path)
            connection.send((run, None))
        except CaseError as error:
            connection.send((None, error))
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
            where = ", ".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in frames)
            connection.send((None, f"{type(error).__name__}: {str(error).strip()} ({where})"))
    os._exit(0)  # nothing is left to write; torch's threads take seconds to end


def _of_every_rank(lines: list[str]) -> list[str]:
    """Without what a rank does for its slices only: FSDP1 drops the gradient of a rank that holds none of the original
    parameters, and steps in the backward what a rank holds."""
    return [line for line in lines if " op=accumulate_sharded " not in line and " op=optim_in_backward " not in line]


class Ranks:
    """Records case after case. `count`: processes, at least as many as a case has ranks (fake: one). Use as a
    context."""

    def __init__(self, count: int, fake: bool = False):
        self._count, self._fake, self._jobs = (1 if fake else count), fake, 0
        self._scratch = contextlib.ExitStack()
        self._folder = self._scratch.enter_context(scratch_folder())
        self._processes: list = []
        self._connections: list = []

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error) -> None:
        self._stop(at_once=error[0] is not None)
        self._scratch.close()

    def _start(self) -> None:
        context = processes.context()
        for rank in range(self._count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, self._fake, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _stop(self, at_once: bool = False) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self._processes:
            if at_once:
                process.terminate()
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._connections = [], []

    def record(self, make_case: MakeCase, order: list[str]) -> list[str]:
        """Rank 0's log. `make_case` is called on every rank. RecordingFailed when a rank fails or the ranks' logs
        differ."""
        if not self._processes:
            self._start()
        self._jobs += 1
        store_path = os.path.join(self._folder, str(self._jobs))
        try:
            for connection in self._connections:
                connection.send((make_case, order, store_path))
            answers = [self._answer(rank, connection) for rank, connection in enumerate(self._connections)]
        except (EOFError, OSError) as error:
            self._stop(at_once=True)
            raise RecordingFailed("a rank's process died: PyTorch crashed") from error
        refused = next((failure for _, failure in answers if isinstance(failure, CaseError)), None)
        failures = [f"rank {rank}: {failure}" for rank, (_, failure) in enumerate(answers) if failure is not None]
        if failures:
            if not self._fake:
                self._stop(at_once=True)  # the other ranks may wait for one that failed
            if refused is not None:
                raise refused
            raise RecordingFailed(failures[0])
        logs = [lines for lines, _ in answers if lines is not None]
        for rank, lines in enumerate(logs):
            if _of_every_rank(lines) != _of_every_rank(logs[0]):
                raise RecordingFailed(f"rank {rank} issues something else than rank 0")
        return logs[0]

    @staticmethod
    def _answer(rank: int, connection):
        if not connection.poll(2 * _TIMEOUT_SECONDS):
            raise EOFError(f"rank {rank} does not answer")
        return connection.recv()
