# SPDX-License-Identifier: Apache-2.0
"""The device in software in a rehearsed process: it is loaded first of all, and what a real one takes beside the
allocator is taken."""

from __future__ import annotations

import ctypes
import os
from types import ModuleType

from . import recording
from .run import refuse, the_run

_unused: list[object] = []  # NCCL backends whose communicators have taken no memory yet
communicators = 0


def begin(torch: ModuleType) -> None:
    """Behind `import torch`, before a tensor exists."""
    _check_version(torch)
    if torch._C._cuda_getDeviceCount() == 0:  # loads the library's kernels
        refuse(
            4,
            f"torch {torch.__version__} finds no device: it has no CUDA, or the library in {the_run().library_folder} "
            "is not of this torch",
        )
    # cuDNN is not there. Flash attention takes its place and allocates the same.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.enabled = False
    torch.cuda._lazy_call(recording.begin)
    torch.cuda._lazy_call(lambda: _take(the_run().context_bytes))


def watch_communicator(backend: object) -> None:
    _unused.append(backend)


def take_communicators() -> None:
    """Takes the memory of the NCCL communicators that have been used since the last call."""
    global communicators
    for backend in list(_unused):
        if _is_connected(backend):
            _unused.remove(backend)
            communicators += 1
            _take(the_run().nccl_bytes)


def _is_connected(backend: object) -> bool:
    """ProcessGroupNCCL connects when it is first used, ProcessGroupNCCL2 (the default of torch 2.15) when it is
    made."""
    asked = getattr(backend, "_is_initialized", None)
    return asked() if asked is not None else True


def _take(size_bytes: int) -> None:
    """cudaMalloc on the rank's device, beside torch's allocator: so `torch.cuda.mem_get_info` has less, as on a real
    one."""
    if size_bytes <= 0:
        return
    runtime = ctypes.CDLL(None)
    current, address = ctypes.c_int(), ctypes.c_void_p()
    runtime.cudaGetDevice(ctypes.byref(current))
    runtime.cudaSetDevice(the_run().local_rank())
    runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size_bytes))
    runtime.cudaSetDevice(current.value)


def _check_version(torch: ModuleType) -> None:
    """The library is built for one minor release of torch, which `torch_version` beside it names. None there: not
    checked."""
    try:
        with open(os.path.join(the_run().library_folder, "torch_version"), encoding="utf-8") as file:
            expected = file.read().strip()
    except OSError:
        return
    if torch.__version__.split(".")[:2] != expected.split(".")[:2]:
        refuse(
            4,
            f"the device in software is built for another torch (found {torch.__version__} in the script's "
            f"interpreter, expected {expected}): build it for this one, or run the script with that one",
        )
