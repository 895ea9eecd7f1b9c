# SPDX-License-Identifier: Apache-2.0
"""The recording of this rank: the device in software writes what is issued to it (device/runtime/recorder.h), and this
tells it what Python alone knows."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType

from .run import the_run

_library: ctypes.CDLL | None = None
_groups: dict[str, dict] = {}  # by c10d's name


def begin() -> None:
    """When CUDA has been initialised. Once."""
    global _library
    path = the_run().record
    if path is None or _library is not None:
        return
    library = ctypes.CDLL(None)
    for name in ("hand_over", "take_over"):
        getattr(library, f"shardplan_record_{name}").argtypes = [ctypes.c_uint64]
    if library.shardplan_record_begin(path.encode()) == 0:
        _library = library
        from . import handovers

        handovers.patch(library.shardplan_record_hand_over, library.shardplan_record_take_over)


def learn_groups() -> None:
    """The process groups that there are now: a script may destroy them before it ends."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if _library is None or c10d is None:
        return
    for group, name in list(c10d._world.pg_names.items()):
        ranks = c10d._world.pg_group_ranks.get(group)
        if ranks:
            _groups[name] = {"ranks": sorted(ranks, key=ranks.__getitem__), "name": getattr(group, "group_desc", "")}


def watch_groups(c10d: ModuleType) -> None:
    destroy = c10d.destroy_process_group

    def destroy_process_group(*arguments: object, **settings: object) -> None:
        learn_groups()
        destroy(*arguments, **settings)

    c10d.destroy_process_group = destroy_process_group


def end(torch: ModuleType) -> None:
    """Writes what the device does not know beside what it has written."""
    path = the_run().record
    if _library is None or path is None:
        return
    learn_groups()
    _library.shardplan_record_end()
    from . import flops

    the_run().tell("described", {"groups": _groups, "flops": flops.of_recorded(torch, path)})


def module(name: str) -> None:
    """The module whose forward this thread runs now; "": none."""
    if _library is not None:
        _library.shardplan_record_module(name.encode(errors="backslashreplace"))


def phase(name: str, step: int) -> None:
    """It ends here."""
    if _library is not None:
        learn_groups()
        _library.shardplan_record_phase(name.encode(), step)


class Operator:
    """A kernel that Python launches, and which memory it touches: [(tensor, whether it is written)]."""

    def __init__(self, name: str, tensors: list[tuple[object, bool]]) -> None:
        self._name, self._tensors = name, tensors

    def __enter__(self) -> None:
        if _library is not None:
            _library.shardplan_record_operator_begin()

    def __exit__(self, kind: type | None, error: object, trace: object) -> None:
        if _library is None:
            return
        count = len(self._tensors)
        sizes: list[int] = []
        strides: list[int] = []
        for tensor, _ in self._tensors:
            sizes += tensor.shape or [1]
            dense = tensor.is_contiguous() or _has_no_gaps(tensor)
            strides += [-1, *[0] * (tensor.dim() - 1)] if dense or tensor.dim() == 0 else tensor.stride()
        names = [str(tensor.dtype).removeprefix("torch.").encode() for tensor, _ in self._tensors]
        _library.shardplan_record_operator_end(
            self._name.encode(errors="backslashreplace"),
            count if kind is None else -1,
            (ctypes.c_uint64 * count)(*[tensor.data_ptr() for tensor, _ in self._tensors]),
            (ctypes.c_char_p * count)(*names),
            (ctypes.c_int32 * count)(*[tensor.dim() for tensor, _ in self._tensors]),
            (ctypes.c_int64 * len(sizes))(*sizes),
            (ctypes.c_int64 * len(strides))(*strides),
            (ctypes.c_uint8 * count)(*[writes for _, writes in self._tensors]),
        )


def is_recording() -> bool:
    return _library is not None


def _has_no_gaps(tensor) -> bool:
    """Its elements are one stretch of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
