# SPDX-License-Identifier: Apache-2.0
"""Modules that are compiled: the recorder sees the operators of their graphs.

torch.compile makes one joint graph of a module's forward and backward, and its partitioner decides which tensors the
forward keeps. A trace takes both from torch: Dynamo, AOTAutograd, the decompositions and the partitioner of the
module's backend run on the fake tensors. Only code generation is left out: the two graphs run operator by operator, in
front of the recorder.

[Note: one way to be compiled] `torch.compile(module)` puts a wrapper around a module, `module.compile()` replaces what
calls it. Before the module tree is read, wrappers are taken away and their modules compiled the second way. So names
are those of the bare model, and the hooks of a compiled module lie outside of its graph, as those of an FSDP unit do.
Modules inside a graph have no hooks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import unittest.mock
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shardplan import patterns
from shardplan.tracer.errors import UsageProblem
from shardplan.tracer.fused import gather
from shardplan.tracer.recorder import Recorder
from shardplan.tracer.user_code import CudaIsCpu

_device_is_there = torch.cuda.is_available
_COMPILED = "_orig_mod"  # the attribute in which torch.compile's wrapper has its module
_CHECKPOINTED = "_checkpoint_wrapped_module"


def backend_of(module: nn.Module) -> str:
    """The name of the backend that compiles this module by itself; "": none does."""
    context = _context(module)
    return "" if context is None else _backend_name(context)


def compile_as(source: nn.Module, target: nn.Module) -> None:
    """Compiles the modules of `target`, a copy of `source`, that Module.compile compiles in `source`: a copy loses
    it."""
    for original, copied in zip(source.modules(), target.modules()):
        if original._compiled_call_impl is not None and (context := _context(original)) is not None:
            copied._compiled_call_impl = context(copied._call_impl)


def prepare(root: nn.Module, wanted: list[str], backend: str, as_written: bool) -> dict[nn.Module, str]:
    """The modules below the root that run as compiled graphs, outermost ones only, and the names of their backends:
    those that the model compiles and those that a pattern of `wanted` means, which `backend` compiles. `as_written`:
    none. Removes the wrappers of torch.compile.
    """
    contexts: dict[nn.Module, Callable] = {}
    _unwrap(root, contexts)
    _compile_wanted(root, wanted, backend, contexts)
    for module in root.modules():
        module._compiled_call_impl = None
    if as_written:
        return {}
    compiled = _outermost(root, contexts)
    for module in compiled:
        module._compiled_call_impl = _on_fake_tensors(contexts[module](module._call_impl))
    return {module: _backend_name(contexts[module]) for module in compiled}


def inside(compiled: dict[nn.Module, str]) -> set[nn.Module]:
    """The modules inside the graphs of `compiled`."""
    return {below for module in compiled for below in module.modules() if below is not module}


def _context(module: nn.Module) -> Callable | None:
    """The context that torch.compile made of its arguments, which compiles any function. None: the module is not
    compiled by itself."""
    if hasattr(module, "dynamo_ctx"):
        return module.dynamo_ctx
    if module._compiled_call_impl is None:
        return None
    return inspect.getclosurevars(module._compiled_call_impl).nonlocals.get("self")  # None: torch.compile(disable=True)


def _backend_name(context: Callable) -> str:
    from torch._dynamo.eval_frame import innermost_backend

    backend = innermost_backend(context.callback)
    return getattr(backend, "compiler_name", None) or getattr(backend, "__name__", type(backend).__name__)


def _unwrap(parent: nn.Module, contexts: dict[nn.Module, Callable]) -> None:
    """Puts modules in the places of their torch.compile wrappers, and of checkpoint wrappers inside of those."""
    for name, child in list(parent._modules.items()):
        if child is None:
            continue
        context = _context(child)
        module = getattr(child, _COMPILED) if hasattr(child, "dynamo_ctx") else child
        if context is not None and hasattr(module, _CHECKPOINTED):
            wrapper, module = module, getattr(module, _CHECKPOINTED)
            module._checkpoint, module._without_checkpoint = wrapper.checkpoint_fn, module.forward
            module.forward = types.MethodType(_checkpointed, module)
        parent._modules[name] = module
        if context is not None:
            contexts[module] = context
        _unwrap(module, contexts)


def _checkpointed(self: nn.Module, *args, **kwargs):
    return self._checkpoint(self._without_checkpoint, *args, **kwargs)


def _compile_wanted(root: nn.Module, wanted: list[str], backend: str, contexts: dict[nn.Module, Callable]) -> None:
    for pattern in wanted:
        found = [
            m for fqn, m in root.named_modules() if m is not root and patterns.matches(pattern, fqn, type(m).__name__)
        ]
        if not found:
            raise UsageProblem(f"--compile {pattern}: no module below the root has that name")
        for module in found:
            if module not in contexts:
                module.compile(backend=backend)
                contexts[module] = _context(module)


def _outermost(parent: nn.Module, contexts: dict[nn.Module, Callable]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in parent.children():
        found += [child] if child in contexts else _outermost(child, contexts)
    return list(dict.fromkeys(found))


def _on_fake_tensors(call: Callable) -> Callable:
    @functools.wraps(call)
    def run(*args, **kwargs):
        with _without_code_generation():
            return call(*args, **kwargs)

    return run


@contextlib.contextmanager
def _without_code_generation() -> Iterator[None]:
    """Inside, torch.compile compiles, and the graphs that inductor would generate code for are run as they are. Nothing
    comes from its caches or goes there. Left out is what asks the device: padding of matrices, which measures kernels,
    and random states of operators that run again, which are on the host. Constants are folded on the CPU. Compilers do
    not see the device that user_code.py shows to the user's code."""
    import torch._functorch.config
    import torch._inductor.config
    from torch._functorch import partitioners
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes import joint_graph

    fold = joint_graph.UniformValueConstantFolder.run
    with (
        torch.compiler.set_stance("default"),
        unittest.mock.patch.object(torch.cuda, "is_available", _device_is_there),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(force_disable_caches=True, shape_padding=False),
        unittest.mock.patch.object(
            compile_fx, "compile_fx", functools.partial(compile_fx.compile_fx, inner_compile=_as_it_is)
        ),
        unittest.mock.patch.object(
            partitioners, "functionalize_rng_ops", lambda _joint, forward, backward, *_: (forward, backward)
        ),
        unittest.mock.patch.object(
            joint_graph.UniformValueConstantFolder, "run", functools.partialmethod(_on_the_cpu, fold)
        ),
    ):
        yield


def _on_the_cpu(folder, fold: Callable, *arguments):
    with CudaIsCpu():
        return fold(folder, *arguments)


def _as_it_is(graph: torch.fx.GraphModule, _inputs, **_options) -> Callable:
    """A compiler of inductor's graphs that generates nothing. The function takes its arguments in a list, which it
    empties."""
    gather(graph.graph)
    graph.graph.set_codegen(torch.fx.graph._BoxedCodeGen())
    graph.recompile()

    def run(args: list):
        recorder = next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)), None)
        with recorder.generated_code() if recorder is not None else contextlib.nullcontext():
            return graph.forward(args)

    run._boxed_call = True
    return run
