"""Ranks to record on: processes with gloo, or one process with torch's fake process group."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from shardplan.conformance.case import Case, CaseError
from shardplan.conformance.record_case import record_case

_TIMEOUT_SECONDS = 120


@contextlib.contextmanager
def _process_group(**arguments) -> Iterator[None]:
    dist.init_process_group(**arguments)
    try:
        yield
    finally:
        dist.destroy_process_group()


def record_on_fake_ranks(case: Case, order: list[str]) -> list[str]:
    """Rank 0's log where collectives do nothing. What the host issues does not depend on what they move."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with _process_group(backend="fake", store=FakeStore(), rank=0, world_size=case.ranks):
        return record_case(case, order)


def _work(rank: int, folder: str, connection) -> None:
    torch.set_num_threads(1)
    while (job := connection.recv()) is not None:
        number, make_case, order = job
        try:
            case: Case = make_case()
            lines = None
            if rank < case.ranks:
                store = dist.FileStore(os.path.join(folder, str(number)), case.ranks)
                timeout = timedelta(seconds=_TIMEOUT_SECONDS)
                with _process_group(backend="gloo", store=store, rank=rank, world_size=case.ranks, timeout=timeout):
                    lines = record_case(case, order)
            connection.send((lines, None))
        except Exception as error:
            text = str(error) if isinstance(error, CaseError) else "".join(traceback.format_exception(error)[-4:])
            connection.send((None, text))


class GlooRanks:
    """Processes that record case after case. Use as a context."""

    def __init__(self, count: int):
        self._count, self._jobs = count, 0
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list = []
        self._connections: list = []

    def __enter__(self) -> "GlooRanks":
        context = multiprocessing.get_context("spawn")
        for rank in range(self._count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, self._folder.name, theirs), daemon=True)
            process.start()
            self._processes.append(process)
            self._connections.append(ours)
        return self

    def __exit__(self, *_error) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.terminate()
        self._folder.cleanup()

    def record(self, make_case: Callable[[], Case], order: list[str]) -> list[str]:
        """Rank 0's log; CaseError when a rank fails or the ranks' logs differ. `make_case` is called on every rank."""
        self._jobs += 1
        for connection in self._connections:
            connection.send((self._jobs, make_case, order))
        answers = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(_TIMEOUT_SECONDS + 60):
                raise CaseError(f"rank {rank} does not answer")
            answers.append(connection.recv())
        for rank, (_, failure) in enumerate(answers):
            if failure is not None:
                raise CaseError(f"rank {rank} failed: {failure}")
        logs = [lines for lines, _ in answers if lines is not None]
        for rank, lines in enumerate(logs):
            if lines != logs[0]:
                at = next((i for i, (a, b) in enumerate(zip(lines, logs[0])) if a != b), min(len(lines), len(logs[0])))
                raise CaseError(f"rank {rank} issues something else than rank 0 at event {at}")
        return logs[0]
