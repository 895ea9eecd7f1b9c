# SPDX-License-Identifier: Apache-2.0
"""Kernels of Triton in a recording: which tensors a launch reads and writes."""

from __future__ import annotations

from types import ModuleType

from . import recording

_WRITTEN = ("out_ptr", "in_out_ptr")


def _tensors(values):
    return [(name, value) for name, value in values if hasattr(value, "data_ptr") and getattr(value, "is_cuda", False)]


def patch_inductor(heuristics: ModuleType) -> None:
    """Inductor names a kernel's arguments by what it does with them."""
    kind = heuristics.CachingAutotuner
    own = kind.run

    def run(self, *arguments, **settings):
        if not recording.is_recording():
            return own(self, *arguments, **settings)
        mutated = set(getattr(self, "mutated_arg_names", ()))
        named = _tensors(zip(self.fn.arg_names, arguments, strict=False))
        touched = [(tensor, name in mutated or name.startswith(_WRITTEN)) for name, tensor in named]
        with recording.Operator(self.fn.__name__, touched):
            return own(self, *arguments, **settings)

    kind.run = run


def patch_triton(jit: ModuleType) -> None:
    own = jit.JITFunction.run

    def run(self, *arguments, **settings):
        if not recording.is_recording() or settings.get("warmup"):
            return own(self, *arguments, **settings)
        named = dict(zip(self.arg_names, arguments, strict=False))
        named.update((name, value) for name, value in settings.items() if name in self.arg_names)
        written = _written(self, named)
        touched = [(tensor, name in written) for name, tensor in _tensors(named.items())]
        with recording.Operator(self.__name__, touched):
            return own(self, *arguments, **settings)

    jit.JITFunction.run = run


_known: dict[tuple, set[str]] = {}


def _written(kernel, named: dict) -> set[str]:
    """Names of tensors that the kernel writes, by its Triton IR; all of them where that cannot be made."""
    key = (id(kernel), tuple((name, getattr(value, "dtype", None) or type(value)) for name, value in named.items()))
    if key not in _known:
        try:
            from torch._higher_order_ops import triton_kernel_wrap as wrap

            if (accessed := getattr(wrap, "identify_accessed_tensors", None)) is not None:
                _known[key] = {write.name for write in accessed(kernel, dict(named), {}).read_writes.writes}
            else:
                _known[key] = set(getattr(wrap, "identify_mutated_tensors")(kernel, dict(named), {}))
        except Exception:  # any: it is another library's analysis of another library's code
            _known[key] = set(named)
    return _known[key]
