# SPDX-License-Identifier: Apache-2.0
"""Durations of work on a device, and of what the host does to issue it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_SAMPLES = 5
_SAMPLE_SECONDS = 4e-3
_MOST_REPEATS = 200


class Machine:
    """The device that a rank measures, and until when it may."""

    def __init__(self, device: torch.device, seconds: float, samples: int = _SAMPLES):
        self.device = device
        self.deadline = time.monotonic() + seconds
        self.samples = samples
        self._can_hold = device.type == "cuda"

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() > self.deadline

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def duration(self, work: Callable[[], object], repeats: int | None = None) -> dict[str, int]:
        """Nanoseconds of one call of `work` on the device, back to back with others: median, least and most of some
        samples.

        On a GPU the queue is held until all calls are issued, so that the time of short kernels is theirs and not the
        host's."""
        work()
        self.synchronize()
        once = self._sample(work, 1)
        repeats = repeats or max(1, min(_MOST_REPEATS, int(_SAMPLE_SECONDS * 1e9 / max(1, once))))
        samples = [self._sample(work, repeats) for _ in range(self.samples)]
        return {
            "duration_ns": max(1, round(statistics.median(samples))), "least_ns": max(1, round(min(samples))),
            "most_ns": max(1, round(max(samples))),
        }

    def _sample(self, work: Callable[[], object], repeats: int) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter_ns()
            for _ in range(repeats):
                work()
            return (time.perf_counter_ns() - begin) / repeats
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._hold(repeats)
        start.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e6 / repeats

    def _hold(self, repeats: int) -> None:
        """Lets the stream wait for as long as the host takes to issue the calls."""
        if not self._can_hold:
            return
        try:
            torch.cuda._sleep(min(200_000_000, 60_000 * (repeats + 4)))  # cycles: 30 us each at 2 GHz
        except (AttributeError, RuntimeError):
            self._can_hold = False

    def host_ns(self, work: Callable[[], object], repeats: int = 200) -> dict[str, int]:
        """Nanoseconds that the host's thread takes for one call, the device not waited for."""
        samples = []
        for _ in range(self.samples):
            work()
            self.synchronize()
            begin = time.perf_counter_ns()
            for _ in range(repeats):
                work()
            samples.append((time.perf_counter_ns() - begin) / repeats)
            self.synchronize()
        return {
            "duration_ns": round(statistics.median(samples)), "least_ns": round(min(samples)),
            "most_ns": round(max(samples)),
        }


def ratio(part: dict[str, int], whole: dict[str, int]) -> int:
    """Parts per million of the one in the other."""
    return round(1e6 * part["duration_ns"] / max(1, whole["duration_ns"]))
