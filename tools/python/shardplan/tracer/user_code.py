# SPDX-License-Identifier: Apache-2.0
"""The machine that a user's code finds while it builds and runs a model in front of the recorder: one with a GPU.

Code that is written for a GPU asks whether there is one, takes device 0, moves its modules there, casts them, compiles
them. None of that has to be taken out for a trace.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
import unittest.mock
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from shardplan.tracer.fake_cuda import CAPABILITY
from shardplan.tracer.module_tree import on_fake_cuda

_MEMORY_BYTES = 80 << 30

_PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=_MEMORY_BYTES,
    multi_processor_count=132,
    gcnArchName="",
    warp_size=32,
)


def _nothing():
    """A function of its own for each name: dynamo has rules by function."""
    return lambda *_args, **_kwargs: None


# Answers of torch.cuda without its driver.
_ANSWERS = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": _nothing(),
    "synchronize": _nothing(),
    "empty_cache": _nothing(),
    "init": _nothing(),
    "is_bf16_supported": lambda including_emulation=True: True,
    "get_device_name": lambda device=None: _PROPERTIES.name,
    "get_device_properties": lambda device=None: _PROPERTIES,
    "mem_get_info": lambda device=None: (_MEMORY_BYTES, _MEMORY_BYTES),
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0,
    "max_memory_reserved": lambda device=None: 0,
    "reset_peak_memory_stats": _nothing(),
    "manual_seed": _nothing(),
    "manual_seed_all": _nothing(),
}


def _replace(module: nn.Module, function: Callable, recurse: bool, made: dict) -> nn.Module:
    """nn.Module._apply, with new parameters in place of changed ones: fake tensors cannot change their device, and
    others refer to them."""
    if recurse:
        for child in module.children():
            child._apply(function)

    def applied(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in made:
            with torch.no_grad():
                made[tensor] = function(tensor)
        return made[tensor]

    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        result = applied(parameter)
        if result is not parameter and not isinstance(result, nn.Parameter):
            result = made[parameter] = nn.Parameter(result, parameter.requires_grad)
            for key, value in parameter.__dict__.items():
                result.__dict__.setdefault(key, value)
        module._parameters[name] = result
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = applied(buffer)
    return module


@contextlib.contextmanager
def _replacing_parameters() -> Iterator[None]:
    """Inside, Module.to, cuda, half, to_empty and the like work on fake tensors. A tie stays a tie: what is made of a
    tensor is kept for the outermost call."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    depth = 0

    def apply(self, fn, recurse=True):
        nonlocal depth
        depth += 1
        try:
            return _replace(self, fn, recurse, made)
        finally:
            depth -= 1
            if depth == 0:
                made.clear()

    with unittest.mock.patch.object(nn.Module, "_apply", apply):
        yield


@contextlib.contextmanager
def on_a_gpu() -> Iterator[None]:
    """Inside FakeTensorMode: code for a GPU runs as on one, and what is compiled runs as written (but modules in front
    of the recorder: compiled.py)."""
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            for name, answer in _ANSWERS.items():
                stack.enter_context(unittest.mock.patch.object(torch.cuda, name, answer))
            stack.enter_context(unittest.mock.patch("torch._subclasses.fake_tensor.init_gpu_context", _nothing()))
        stack.enter_context(_replacing_parameters())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _built_without_weights(cls, name=None, *_arguments, config=None, **options):
    """PreTrainedModel.from_pretrained: the class of the config, in evaluation mode; nothing is read but the config."""
    from transformers.initialization import no_init_weights

    if config is None or isinstance(config, (str, os.PathLike)):
        config = cls.config_class.from_pretrained(config or name)
    wanted = {
        key: options[key]
        for key in ("dtype", "torch_dtype", "attn_implementation")
        if options.get(key) not in (None, "auto")
    }
    with no_init_weights():
        model = cls._from_config(config, **wanted)
    model.tie_weights()
    return model.eval()


@contextlib.contextmanager
def weights_left_out() -> Iterator[bool]:
    """Inside, from_pretrained of transformers reads no weights. Gives whether the package was there to be changed."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        yield False
        return
    with unittest.mock.patch.object(
        transformers.PreTrainedModel, "from_pretrained", classmethod(_built_without_weights)
    ):
        yield True


class CudaIsCpu(TorchFunctionMode):
    """Inside, what asks for a CUDA device gets the CPU: for a model that is built on real tensors where there is no
    GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*map(_without_cuda, args), **{name: _without_cuda(value) for name, value in kwargs.items()})


class LabelsOnDevice(TorchFunctionMode):
    """Inside, an operator that gets tensors of the fake CUDA device and of the CPU gets all of them from the device:
    the labels of a loss that makes them where it runs. Each is moved once and kept, as what a batch holds. Numbers
    (tensors of no dimension) stay where they are."""

    def __init__(self, unrecorded: Callable[[], contextlib.AbstractContextManager]):
        super().__init__()
        self._unrecorded = unrecorded
        self._moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: the tensor, and what stands for it

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(t.device.type == "cuda" for t in tensors) and any(map(_is_label, tensors)):
            args, kwargs = tree_map(self._on_device, (args, kwargs))
        return func(*args, **kwargs)

    def _on_device(self, value):
        if not isinstance(value, torch.Tensor) or not _is_label(value):
            return value
        if id(value) not in self._moved:
            with self._unrecorded():
                self._moved[id(value)] = (value, on_fake_cuda(value))
        return self._moved[id(value)][1]


def _is_label(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dim() > 0 and not tensor.requires_grad


def _without_cuda(value):
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


def as_written(module: nn.Module) -> nn.Module:
    """The module that torch.compile was given."""
    return getattr(module, "_orig_mod", module)
