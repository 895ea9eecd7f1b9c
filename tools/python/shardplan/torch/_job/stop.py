# SPDX-License-Identifier: Apache-2.0
"""A job that is told to end by a signal: all ranks leave their loop behind the same step.

[Note: who was told] A launcher signals every rank, at no one moment, and ranks are not at the same place in their
loops. So each step ends with a sum of who was told, over CPU ranks and beside the next step: it is looked at one step
later, by all, and all find the same.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from .arguments import default_timeout_s
from .peers import connect


class StopOnSignal:
    """The context that `stop_on_signal` returns."""

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._signals = tuple(signals)
        self._told = False
        self._before: dict[signal.Signals, object] = {}
        self._group: dist.ProcessGroup | None = None
        self._sum: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("shardplan: signals come to the main thread alone: enter stop_on_signal there")
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note)
        try:
            if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake":
                self._group = connect(lambda: dist.new_group(backend="gloo"), default_timeout_s())
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._restore()
        if kind is None and self._work is not None:
            self._work.wait()
        self._work = self._group = None

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._told = True

    @property
    def told(self) -> bool:
        """Whether this rank has had a signal."""
        return self._told

    def __call__(self) -> bool:
        """At the end of a step, on every rank: whether the loop is to end here. The same on all ranks. A signal of one
        of them is known behind the next step."""
        if self._group is None:
            return self._told
        if self._work is not None:
            self._work.wait()
        stops = self._sum is not None and bool(self._sum.item())
        self._sum = torch.tensor(int(self._told))
        self._work = dist.all_reduce(self._sum, group=self._group, async_op=True)
        return stops


def stop_on_signal(signals: Sequence[signal.Signals] = (signal.SIGTERM,)) -> StopOnSignal:
    """A job that saves and ends where its launcher says so:

        with shardplan.torch.stop_on_signal() as stop:
            for step in range(first, steps):
                train(step)
                if stop():
                    shardplan.torch.save(f"checkpoints/step_{step + 1}", model, optimizer)
                    break

    While the context lasts, these signals end nothing by themselves. Entered in the main thread. Collective, as the
    calls of `stop` are.
    """
    return StopOnSignal(signals)
