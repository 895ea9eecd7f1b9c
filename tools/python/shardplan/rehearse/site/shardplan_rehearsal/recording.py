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
    _library.shardplan_record_phase(b"", -1)  # all is in the file
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
        addresses, sizes = (ctypes.c_uint64 * count)(), (ctypes.c_uint64 * count)()
        written = (ctypes.c_uint8 * count)()
        for i, (tensor, writes) in enumerate(self._tensors):
            addresses[i], sizes[i], written[i] = tensor.data_ptr(), _span_bytes(tensor), writes
        _library.shardplan_record_operator_end(
            self._name.encode(errors="backslashreplace"), count if kind is None else -1, addresses, sizes, written
        )


def is_recording() -> bool:
    return _library is not None


def _span_bytes(tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
