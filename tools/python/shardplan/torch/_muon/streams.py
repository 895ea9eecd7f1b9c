# SPDX-License-Identifier: Apache-2.0
"""The streams of an optimizer step: CUDA's, or on the CPU the host with collectives in flight beside it. Exchanges that
begin in the backward come from hooks, whose current stream is that of the reductions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .program import Buffer


class Streams(Protocol):
    """Streams are positions in the plan's list; the first one computes."""

    def arrive(self) -> None:
        """The caller's stream is that of the plan which computes."""

    def follow(self, stream: int) -> None:
        """That stream waits for the one on which the caller is."""

    def on(self, stream: int) -> contextlib.AbstractContextManager:
        """Inside, what is issued is behind all of that stream."""

    def collective(self, stream: int, buffers: tuple[Buffer, Buffer], call: Callable[[bool], Any]) -> None:
        """call(async_op) -> the work, where it was asynchronous."""

    def record(self, event: str, stream: int) -> None: ...

    def wait(self, event: str, stream: int) -> None: ...

    def host_wait(self, event: str) -> None: ...

    def safe_after(self, tensor: torch.Tensor, streams: Sequence[int]) -> None:
        """The memory of the tensor is not used again before these streams have come here."""

    def finish(self) -> None:
        """The step is over, or has failed."""


class HostStreams:
    """The host does all work in the order of its issue, except collectives, which it waits for where the plan waits."""

    def __init__(self) -> None:
        self._flying: dict[int, list[tuple[Any, tuple[Buffer, Buffer]]]] = {}  # by stream
        self._events: dict[str, list[Any]] = {}

    def _await(self, works: list[Any]) -> None:
        for work in works:
            work.wait()
        for stream, flying in self._flying.items():
            self._flying[stream] = [entry for entry in flying if entry[0] not in works]

    def arrive(self) -> None: ...

    def follow(self, stream: int) -> None: ...

    def on(self, stream: int) -> contextlib.AbstractContextManager:
        self._await([work for work, _ in self._flying.get(stream, [])])
        return contextlib.nullcontext()

    def collective(self, stream: int, buffers: tuple[Buffer, Buffer], call: Callable[[bool], Any]) -> None:
        names = {buffer.name for buffer in buffers}
        flying = self._flying.setdefault(stream, [])
        self._await([work for work, used in flying if names & {buffer.name for buffer in used}])
        self._flying[stream].append((call(True), buffers))

    def record(self, event: str, stream: int) -> None:
        self._events[event] = [work for work, _ in self._flying.get(stream, [])]

    def wait(self, event: str, stream: int) -> None:
        self._await(self._events.get(event, []))

    def host_wait(self, event: str) -> None:
        self._await(self._events.get(event, []))

    def safe_after(self, tensor: torch.Tensor, streams: Sequence[int]) -> None:
        """A collective holds its tensors until it is done."""

    def finish(self) -> None:
        self._await([work for flying in self._flying.values() for work, _ in flying])
        self._events.clear()


class CudaStreams:
    """A collective is work of its stream."""

    def __init__(self, device: torch.device, priorities: Sequence[int]) -> None:
        self._compute = torch.cuda.current_stream()
        self._others = [torch.cuda.Stream(device, priority) for priority in priorities[1:]]
        self._events: dict[str, torch.cuda.Event] = {}

    def _stream(self, stream: int) -> torch.cuda.Stream:
        return self._compute if stream == 0 else self._others[stream - 1]

    def arrive(self) -> None:
        self._compute = torch.cuda.current_stream()

    def follow(self, stream: int) -> None:
        self._stream(stream).wait_stream(torch.cuda.current_stream())

    def on(self, stream: int) -> contextlib.AbstractContextManager:
        return torch.cuda.stream(self._stream(stream))

    def collective(self, stream: int, buffers: tuple[Buffer, Buffer], call: Callable[[bool], Any]) -> None:
        with self.on(stream):
            call(False)

    def record(self, event: str, stream: int) -> None:
        self._events.setdefault(event, torch.cuda.Event()).record(self._stream(stream))

    def wait(self, event: str, stream: int) -> None:
        if event in self._events:
            self._stream(stream).wait_event(self._events[event])

    def host_wait(self, event: str) -> None:
        if event in self._events:
            self._events[event].synchronize()

    def safe_after(self, tensor: torch.Tensor, streams: Sequence[int]) -> None:
        for stream in streams:
            tensor.record_stream(self._stream(stream))

    def finish(self) -> None: ...


def make_streams(device: torch.device, priorities: Sequence[int]) -> Streams:
    return CudaStreams(device, priorities) if device.type == "cuda" else HostStreams()
