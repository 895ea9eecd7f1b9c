# SPDX-License-Identifier: Apache-2.0
"""Which module runs: written into the allocator's history with the number of the stretch ("12|f|model.layers.3").

The letter says who wrote it: f the forward of a module (also when it is run again in a backward), b the backward of a
unit of FSDP2. A thread keeps what was written last, so what follows a unit's begin in autograd's thread is the unit's,
up to the next unit.
"""

from __future__ import annotations

import threading
import weakref
from types import ModuleType

from . import recording
from .phases import Recorder
from .run import the_run

FORWARD_MARK, BACKWARD_MARK = "f", "b"
ROOT = "(root)"
MOST_EVENTS = 1_000_000  # of the history, a KiB each; beyond it the first are lost
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

_names: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_parameter_names: dict[int, tuple[weakref.ref, str]] = {}  # by identity: == of tensors is another thing
_running = threading.local()
_recorder: Recorder | None = None


def name_of(module) -> str | None:
    return _names.get(module)


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _name_all(root, recorder: Recorder) -> None:
    """Names of a module that nothing else has called, and of those in it."""
    parameters = dict(root.named_parameters())
    for name, module in root.named_modules():
        _names.setdefault(module, _clean(name) or (ROOT if parameters else type(root).__name__))
    for name, parameter in parameters.items():
        _parameter_names[id(parameter)] = weakref.ref(parameter), _clean(name).rpartition(".")[0] or ROOT
    recorder.learn_parameters(parameters.values())


def _parameter_name(parameter) -> str:
    reference, name = _parameter_names.get(id(parameter), (None, ""))
    return name if reference is not None and reference() is parameter else ""


def _mark(torch: ModuleType, kind: str, name: str) -> None:
    torch._C._cuda_setMemoryMetadata(f"{len(_recorder.stretches)}|{kind}|{name}")


def begin(torch: ModuleType, recorder: Recorder) -> None:
    global _recorder
    _recorder = recorder
    recorder.name_of_parameter = _parameter_name
    marks = hasattr(torch._C, "_cuda_setMemoryMetadata") and the_run().history
    main = threading.get_ident()
    is_compiling = torch.compiler.is_compiling

    def mark() -> None:
        stack = getattr(_running, "stack", None)
        name = stack[-1][1] if stack else ""
        recording.module(name)
        if marks:
            _mark(torch, FORWARD_MARK, name)

    def enters(module, _arguments) -> None:
        if is_compiling():
            return
        if not hasattr(_running, "stack"):
            _running.stack = []
        if threading.get_ident() == main:
            recorder.module_runs()
        name = _names.get(module)
        if name is None:
            _name_all(module, recorder)
            name = _names.get(module, "")
        _running.stack.append((module, name))
        mark()

    def leaves(module, _arguments, _output) -> None:
        if is_compiling():
            return
        stack = getattr(_running, "stack", [])
        while stack and stack.pop()[0] is not module:
            pass
        mark()

    hooks = torch.nn.modules.module
    hooks.register_module_forward_pre_hook(enters)
    hooks.register_module_forward_hook(leaves, always_call=True)
    if the_run().history:
        recorder.when_boundary = mark
        _record_history(torch)
        torch.cuda._lazy_call(mark)


def _record_history(torch: ModuleType) -> None:
    """From the first use of the device. The script's own recording would end it: it finds one that is under way, with
    more in it."""
    memory = torch.cuda.memory
    record = memory._record_memory_history
    torch.cuda._lazy_call(lambda: record("all", context="alloc", stacks="python", max_entries=MOST_EVENTS))
    memory._record_memory_history = lambda *_arguments, **_settings: None


def patch_fsdp(module: ModuleType) -> None:
    """A unit of FSDP2 says when its backward begins and ends."""
    import torch

    if not hasattr(torch._C, "_cuda_setMemoryMetadata"):
        return
    for method in ("pre_backward", "post_backward"):
        _wrap(torch, module.FSDPParamGroup, method)


def _wrap(torch: ModuleType, group: type, method: str) -> None:
    own = getattr(group, method)

    def wrapped(self, *arguments: object, **settings: object) -> object:
        if _recorder is not None and the_run().history:
            _mark(torch, BACKWARD_MARK, _clean(self._module_fqn or "") or ROOT)
        return own(self, *arguments, **settings)

    setattr(group, method, wrapped)
