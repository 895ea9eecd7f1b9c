# SPDX-License-Identifier: Apache-2.0
"""Peaks of the allocator over stretches of a run, without a change in what the script itself reads.

    script's reset            boundary            boundary        script reads
         |---------------------|-------------------|---------------|
              peak a: kept          peak b: kept        peak c          max(a, b, c)

A boundary reads the peaks and resets them. The script's `torch.cuda.max_memory_allocated` is the largest since its own
reset.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

_Key = tuple[str, ...]


def _walk(stats: dict, path: _Key = ()):
    """(path, dictionary) of everything in the statistics that has a peak."""
    for name, value in stats.items():
        if isinstance(value, dict):
            if "peak" in value:
                yield (*path, name), value
            else:
                yield from _walk(value, (*path, name))


class Peaks:
    def __init__(self, torch: ModuleType) -> None:
        self._read: Callable[[int], dict] = torch._C._cuda_memoryStats
        self._reset: Callable[[int], None] = torch._C._cuda_resetPeakMemoryStats
        self._kept: dict[int, dict[_Key, int]] = {}  # by device: since the script's own reset
        torch._C._cuda_memoryStats = self.stats
        torch._C._cuda_resetPeakMemoryStats = self.script_resets
        for name, own in (
            ("_accelerator_getDeviceStats", self._wrapped_stats),
            ("_accelerator_resetPeakStats", self._wrapped_reset),
        ):
            if hasattr(torch._C, name):
                setattr(torch._C, name, own(getattr(torch._C, name)))

    def stats(self, device: int) -> dict:
        """The statistics that the script sees."""
        return self._with_kept(device, self._read(device))

    def script_resets(self, device: int) -> None:
        self._kept.pop(device, None)
        self._reset(device)

    def boundary(self, device: int) -> dict:
        """Statistics whose peaks are those since the last boundary."""
        stats = self._read(device)
        kept = self._kept.setdefault(device, {})
        for key, value in _walk(stats):
            kept[key] = max(kept.get(key, 0), value["peak"])
        self._reset(device)
        return stats

    def _with_kept(self, device: int, stats: dict) -> dict:
        kept = self._kept.get(device, {})
        for key, value in _walk(stats):
            value["peak"] = max(value["peak"], kept.get(key, 0))
        return stats

    def _wrapped_stats(self, own: Callable[[int], dict]) -> Callable[[int], dict]:
        return lambda device: self._with_kept(device, own(device))

    def _wrapped_reset(self, own: Callable[[int], None]) -> Callable[[int], None]:
        def reset(device: int) -> None:
            self._kept.pop(device, None)
            own(device)

        return reset
