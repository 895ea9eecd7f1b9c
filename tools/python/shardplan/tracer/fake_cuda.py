# SPDX-License-Identifier: Apache-2.0
"""Forward and backward on fake CUDA tensors without a CUDA device.

FakeTensorMode does most of it: without a device it installs a no-op device guard. Two things are missing.

1. A backward asks the CUDA hooks object whether device 0 has a primary context (the engine wants to stash its
   streams), and without a driver that question throws. `_no_primary_context` gives the object a copy of its own virtual
   table in which that one answer is no.
2. Libraries ask torch.cuda for the compute capability before they choose a kernel. `fake_cuda` answers for an H100.

With a real device present nothing is replaced but the capability, so that a trace does not depend on the machine it is
made on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import re
import time
from collections.abc import Iterator

import torch

from shardplan.tracer.errors import EnvironmentProblem

CAPABILITY = (9, 0)

# The hooks' first base, whose functions come first in the table.
_HOOKS_HEADER = "include/ATen/detail/AcceleratorHooksInterface.h"
_VIRTUAL = re.compile(r"^\s*virtual\b[^(]*?(~?\w+)\(", re.MULTILINE)
_ASKED = "hasPrimaryContext"
_TABLE_ENTRIES = 96  # more than the class has; copied as they are
_TABLE_PREFIX = 2  # offset-to-top and type information lie before the address an object points at
_GET_HOOKS = "_ZN2at6detail12getCUDAHooksEv"


# The autograd engine starts its threads at the first backward of the process, one per device it sees by then: without a
# device, the one of the no-op guard. Installed at import, so that a backward on the CPU before the first trace does no
# harm.
if not torch.cuda.is_available():
    torch._C._ensureCUDADeviceGuardSet()

ENGINE_WITHOUT_DEVICE = "device_ready_queues_"  # in the message of a backward whose device has no thread


@functools.cache
def _slot_of_question(torch_folder: str) -> int:
    """The question's place in the virtual table. It is ABI of a torch release, so the header that this one was built
    with says it."""
    header = os.path.join(torch_folder, _HOOKS_HEADER)
    try:
        with open(header, encoding="utf-8") as file:
            declared = _VIRTUAL.findall(file.read())
        before = declared[: declared.index(_ASKED)]
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(
            f"tracing without a GPU needs to know where torch {torch.__version__} asks for a device's context: "
            f"{header} is not there, or does not"
            f" declare {_ASKED} (torch 2.11.0 and 2.15.0 do)"
        ) from error
    return sum(2 if name.startswith("~") else 1 for name in before)  # a destructor has two entries


@contextlib.contextmanager
def _no_primary_context() -> Iterator[None]:
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        raise EnvironmentProblem(
            f"tracing without a GPU needs x86-64 Linux; found {platform.machine()} {platform.system()}"
        )
    folder = os.path.dirname(torch.__file__)
    slot = _slot_of_question(folder)
    library = ctypes.CDLL(os.path.join(folder, "lib", "libtorch_cpu.so"))
    get_hooks = getattr(library, _GET_HOOKS)
    get_hooks.restype, get_hooks.argtypes = ctypes.c_void_p, []
    hooks = ctypes.cast(get_hooks(), ctypes.POINTER(ctypes.c_void_p))
    original = hooks[0]
    word = ctypes.sizeof(ctypes.c_void_p)
    source = ctypes.cast(original - _TABLE_PREFIX * word, ctypes.POINTER(ctypes.c_void_p))
    table = (ctypes.c_void_p * (_TABLE_ENTRIES + _TABLE_PREFIX))(
        *(source[i] for i in range(_TABLE_ENTRIES + _TABLE_PREFIX))
    )
    answer = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda _self, _device: False)
    table[_TABLE_PREFIX + slot] = ctypes.cast(answer, ctypes.c_void_p).value
    hooks[0] = ctypes.addressof(table) + _TABLE_PREFIX * word
    try:
        yield
    finally:
        # The engine's device thread still lets go of the last task. It needs the interpreter for that, and would be
        # killed in the middle of it (aborting the process) if the interpreter ended right now.
        time.sleep(0.02)
        hooks[0] = original


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Inside, fake CUDA tensors can go forward and backward on any machine."""
    saved = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY
    try:
        with contextlib.nullcontext() if torch.cuda.is_available() else _no_primary_context():
            yield
    finally:
        torch.cuda.get_device_capability = saved
