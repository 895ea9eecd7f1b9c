# SPDX-License-Identifier: Apache-2.0
"""Kernels that compute nothing and say what they cost: `launch`, and `Kernel` for a function that is one kernel each way.

A kernel is an operator of its own name. Its outputs are allocated before it (torch.empty), as the code around a real kernel does; so births and deaths
of tensors are those of that code.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

_SCHEMA = "(Tensor[] reads, Tensor(a!)[] writes, int flops, int? bytes_read, int? bytes_written) -> ()"
_operators: dict[object, torch.library.Library] = {}  # and the library that keeps each registered


class Cost(NamedTuple):
    """None: what the tensors make, each touched once."""

    flops: int
    bytes_read: int | None
    bytes_written: int | None


def is_declared(operator) -> bool:
    return operator in _operators


def declared_cost(args: tuple) -> Cost:
    return Cost(*args[2:5])


@functools.cache
def _operator(name: str):
    namespace, _, base = name.rpartition(".")
    library = torch.library.Library(namespace.replace(".", "_"), "FRAGMENT")
    library.define(base + _SCHEMA)
    library.impl(base, lambda *_: None, "Meta")  # there is no other: on real tensors it fails
    operator = getattr(getattr(torch.ops, library.ns), base).default
    _operators[operator] = library
    return operator


def launch(
    name: str,
    reads: Sequence[Tensor | None],
    writes: Sequence[Tensor | None],
    flops: int = 0,
    bytes_read: int | None = None,
    bytes_written: int | None = None,
) -> None:
    """One kernel, "library.kernel" in the trace. Call it where autograd records nothing: in an autograd.Function, or under no_grad."""
    present = ([tensor for tensor in tensors if tensor is not None] for tensors in (reads, writes))
    _operator(name)(*present, flops, bytes_read, bytes_written)


@dataclass
class Kernel:
    """What a stand-in returns for a function that is one kernel forward and one backward. Sizes are in bytes; None: what the tensors make, each
    touched once."""

    outputs: object  # what the function returns: tensors that the stand-in made (x.new_empty(...)), or a nest of them
    saved: Sequence[Tensor] = ()  # for the backward: arguments, outputs, and others that the stand-in made
    temporaries: Sequence[Tensor] = ()  # alive until the kernel is over
    flops: int = 0
    bytes_read: int | None = None
    bytes_written: int | None = None
    backward_flops: int | None = None  # None: twice as many
    backward_bytes_read: int | None = None
    backward_bytes_written: int | None = None


class _OneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name: str, kernel: Kernel, *inputs: Tensor):
        outputs = tree_leaves(kernel.outputs)
        made = [tensor for tensor in (*outputs, *kernel.saved) if all(tensor is not given for given in inputs)]
        distinct = [tensor for index, tensor in enumerate(made) if all(tensor is not other for other in made[:index])]
        launch(name, inputs, distinct, kernel.flops, kernel.bytes_read, kernel.bytes_written)
        ctx.save_for_backward(*kernel.saved)
        backward_flops = 2 * kernel.flops if kernel.backward_flops is None else kernel.backward_flops
        ctx.cost = (backward_flops, kernel.backward_bytes_read, kernel.backward_bytes_written)
        ctx.kernel = name
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs]
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *gradients):
        made = [
            torch.empty(shape, dtype=dtype, device=device) if needed else None
            for needed, (shape, dtype, device) in zip(ctx.needs_input_grad[2:], ctx.like)
        ]
        launch(f"{ctx.kernel}_backward", [*gradients, *ctx.saved_tensors], made, *ctx.cost)
        return None, None, *made


def run(name: str, made, arguments: tuple):
    """What a stand-in made of the arguments: a Kernel runs as `name`, everything else is returned as it is."""
    if not isinstance(made, Kernel):
        return made
    inputs = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    leaves, shape = tree_flatten(made.outputs)
    made.outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    returned = iter(_OneKernel.apply(name, made, *inputs))
    made.temporaries = ()
    return tree_unflatten([next(returned) if isinstance(leaf, Tensor) else leaf for leaf in leaves], shape)
