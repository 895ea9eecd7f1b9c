# SPDX-License-Identifier: Apache-2.0
"""Which module runs: its FQN is written into the allocator's history, with the number of the stretch ("12|model.layers.3")."""

from __future__ import annotations

import threading
import weakref
from types import ModuleType

from .phases import Recorder
from .run import the_run

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module.")
ROOT = "(root)"

_names: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_running = threading.local()


def name_of(module) -> str | None:
    return _names.get(module)


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS[:3]:
        name = name.replace(wrapper, "")
    return name.removesuffix("." + _WRAPPERS[0].removesuffix(".")).removesuffix("._checkpoint_wrapped_module").removesuffix("._fsdp_wrapped_module")


def _name_all(root, recorder: Recorder) -> None:
    """Names of a module that nothing else has called, and of those in it."""
    parameters = list(root.parameters())
    for name, module in root.named_modules():
        _names.setdefault(module, _clean(name) or (ROOT if parameters else type(root).__name__))
    recorder.learn_parameters(parameters)


def begin(torch: ModuleType, recorder: Recorder) -> None:
    set_metadata = getattr(torch._C, "_cuda_setMemoryMetadata", None)
    main = threading.get_ident()
    is_compiling = torch.compiler.is_compiling

    def mark() -> None:
        stack = getattr(_running, "stack", None)
        if set_metadata is not None:
            set_metadata(f"{len(recorder.stretches)}|{stack[-1][1] if stack else ''}")

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
        recorder.when_boundary = lambda _number: mark()
        torch.cuda._lazy_call(lambda: torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python"))
        if set_metadata is not None:
            torch.cuda._lazy_call(mark)
