# SPDX-License-Identifier: Apache-2.0
"""The recording of this rank: the device in software writes what is issued to it (device/runtime/recorder.h), and this
tells it what Python alone knows."""

from __future__ import annotations

import ctypes

from .run import the_run

_library: ctypes.CDLL | None = None


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


def module(name: str) -> None:
    """The module whose forward this thread runs now; "": none."""
    if _library is not None:
        _library.shardplan_record_module(name.encode(errors="backslashreplace"))


def phase(name: str, step: int) -> None:
    """It ends here."""
    if _library is not None:
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
