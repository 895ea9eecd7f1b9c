# SPDX-License-Identifier: Apache-2.0
"""Models from `package.module:callable`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_map

from shardplan.tracer import sharding_calls
from shardplan.tracer.errors import TracerError
from shardplan.tracer.module_tree import on_fake_cuda
from shardplan.tracer.places import one_line, place
from shardplan.tracer.user_code import CudaIsCpu, as_written, weights_left_out


@dataclass
class Example:
    """The result of a callable: a module, its inputs, and its loss (None: the default)."""

    module: nn.Module
    args: tuple
    kwargs: dict
    loss: Callable | None


def find_callable(source: str) -> Callable:
    module_name, _, path = source.partition(":")
    if not module_name or not path:
        raise TracerError(f'"{source}" is neither a file nor package.module:callable')
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise TracerError(f'no module "{error.name}" (looked in the current folder and on sys.path)') from error
        raise TracerError(f'importing "{module_name}" failed: {type(error).__name__}: {error}') from error
    except Exception as error:
        raise TracerError(f'importing "{module_name}" failed: {type(error).__name__}: {error}') from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise TracerError(f'module "{module_name}" has no "{path}"')
        found = getattr(found, name)
    if not callable(found):
        raise TracerError(f'"{source}" is a {type(found).__name__}; expected a callable that returns a torch.nn.Module')
    return found


def _call(function: Callable, source: str, batch: int, seq: int):
    sharding_calls.begin_building()
    try:
        wanted = inspect.signature(function).parameters
    except (TypeError, ValueError):
        wanted = {}
    known = {"batch": batch, "seq": seq}
    return function(**{name: value for name, value in known.items() if name in wanted})


def build(function: Callable, source: str, batch: int, seq: int) -> Example:
    """Calls the callable on fake CUDA tensors; where it must read values, once more on real CPU ones. Call inside
    FakeTensorMode."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    def call():
        with weights_left_out() as left_out:
            try:
                with torch.device("cuda"):
                    return _call(function, source, batch, seq)
            except (DataDependentOutputException, DynamicOutputShapeException):
                with unset_fake_temporarily(), CudaIsCpu():
                    made = _call(function, source, batch, seq)
                if isinstance(made, tuple) and len(made) == 3:
                    _captured_on_device(made[2])
                return made
            except Exception:
                if left_out or "transformers" not in sys.modules:
                    raise
        return call()  # which has imported transformers by now

    try:
        made = call()
    except (Exception, SystemExit) as error:
        raise TracerError(
            f'calling "{source}" failed: {type(error).__name__}: {one_line(error)}{place(error, None)}'
        ) from error
    return _example(made, source, batch, seq)


def _captured_on_device(loss) -> None:
    """The tensors that a loss captured on the CPU because everything was built there: its labels."""
    for cell in getattr(loss, "__closure__", None) or ():
        value = cell.cell_contents
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() > 0:
            cell.cell_contents = on_fake_cuda(value)


def _example(made, source: str, batch: int, seq: int) -> Example:
    module, inputs, loss = made, None, None
    if isinstance(made, tuple) and made and isinstance(made[0], nn.Module):
        if len(made) > 3:
            raise TracerError(
                f'"{source}" returned a tuple of {len(made)}; expected (module, inputs) or (module, inputs, loss)'
            )
        module, inputs, loss = (*made, None, None)[:3]
    if not isinstance(module, nn.Module):
        raise TracerError(
            f'"{source}" returned a {type(made).__name__}; expected a torch.nn.Module or a tuple (module, inputs[, '
            'loss])'
        )
    if loss is not None and not callable(loss):
        raise TracerError(
            f'"{source}" returned a {type(loss).__name__} as loss; expected a callable of the module\'s output'
        )
    module = as_written(module)
    if inputs is None:
        inputs = (torch.empty(batch, seq, dtype=torch.long, device="cuda"),)
    if isinstance(inputs, dict):
        return Example(module, (), inputs, loss)
    return Example(module, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}, loss)


def move_inputs(value, compute_dtype: torch.dtype | None):
    """Tensors become fake CUDA ones; floating ones take the compute dtype, as FSDP casts the inputs of its root."""

    def move(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        dtype = compute_dtype if leaf.dtype.is_floating_point else None
        if leaf.device.type == "cuda" and dtype in (None, leaf.dtype):
            return leaf
        moved = on_fake_cuda(leaf, dtype)
        return moved.requires_grad_(leaf.requires_grad)

    return tree_map(move, value)
