# SPDX-License-Identifier: Apache-2.0
"""Kernels that compute nothing and say what they cost: `launch`, and `Kernel` for a function that is one kernel each
way.

A kernel is an operator of its own name, "library::kernel" as torch writes it. The name decides at which rate its FLOPs
run (import_profile/operator_classes.json). Its outputs are allocated before it (torch.empty), as the code around a real
kernel does; so births and deaths of tensors are those of that code.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shardplan.tracer.errors import TracerError
from shardplan.tracer.places import one_line

_SCHEMA = (
    "(Tensor[] reads, Tensor(a!)[] writes, int flops, ScalarType? dtype, int? bytes_read, int? bytes_written) -> ()"
)
_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*", re.ASCII)
_operators: dict[object, torch.library.Library] = {}  # and the library that keeps each registered


class Cost(NamedTuple):
    """None: what the tensors make, each touched once; of the dtype that of the largest floating one."""

    flops: int
    dtype: torch.dtype | None
    bytes_read: int | None
    bytes_written: int | None


def is_declared(operator) -> bool:
    return operator in _operators


def declared_cost(args: tuple) -> Cost:
    return Cost(*args[2:6])


@functools.cache
def _operator(name: str):
    if not _NAME.fullmatch(name):
        raise TracerError(f'a stand-in launches a kernel called "{name}"; expected "library::kernel"')
    namespace, base = name.split("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    try:
        library.define(base + _SCHEMA)
        library.impl(base, lambda *_: None, "Meta")  # there is no other: on real tensors it fails
    except RuntimeError as error:
        raise TracerError(
            f'a stand-in launches a kernel called "{name}", which torch refuses: {one_line(error)}'
        ) from error
    operator = getattr(getattr(torch.ops, namespace), base).default
    _operators[operator] = library
    return operator


def launch(
    name: str,
    reads: Sequence[Tensor | None],
    writes: Sequence[Tensor | None],
    flops: int = 0,
    dtype: torch.dtype | None = None,
    bytes_read: int | None = None,
    bytes_written: int | None = None,
) -> None:
    """One kernel, "library::kernel". Call it where autograd records nothing: in an autograd.Function, or under no_grad.

    dtype: of the arithmetic; None: of the floating tensor with the most elements that it reads. Bytes: None: what the
    tensors make, each touched once.
    """
    present = ([tensor for tensor in tensors if tensor is not None] for tensors in (reads, writes))
    _operator(name)(*present, flops, dtype, bytes_read, bytes_written)


@dataclass
class Kernel:
    """The result of a stand-in for a function that is one kernel forward and one, `name`_backward, backward. Sizes are
    in bytes; None: what the tensors make, each touched once."""

    outputs: object  # what the function returns: tensors that the stand-in made (x.new_empty(...)), or a nest of them
    saved: Sequence[Tensor] = ()  # for the backward: inputs, outputs, and others that the stand-in made
    temporaries: Sequence[Tensor] = ()  # alive until the kernel is over
    flops: int = 0
    bytes_read: int | None = None
    bytes_written: int | None = None
    backward_flops: int | None = None  # None: twice as many
    backward_bytes_read: int | None = None
    backward_bytes_written: int | None = None
    name: str | None = None  # "library::kernel"; None: after the function
    dtype: torch.dtype | None = None  # of the arithmetic; None: of the floating tensor with the most elements
    # Read by the forward; None: the tensors among the arguments, and parameters of modules among them.
    inputs: Sequence[Tensor] | None = None

    def problem(self, inputs: Sequence[object]) -> str:
        """The mistake in it; "" if there is none."""
        outputs = [leaf for leaf in tree_leaves(self.outputs) if isinstance(leaf, Tensor)]
        if not outputs:
            return "outputs without a tensor; expected tensors made of an argument, as x.new_empty(...)"
        for field, tensors in (
            ("inputs", inputs),
            ("outputs", outputs),
            ("saved", self.saved),
            ("temporaries", self.temporaries),
        ):
            if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
                return f"{field} of type {type_name(tensors)}; expected a list or tuple of tensors"
            for tensor in tensors:
                if not isinstance(tensor, Tensor):
                    return f"{field} with an element of type {type_name(tensor)}; expected tensors"
                if field != "inputs" and tensor.device.type != "cuda":
                    return (
                        f"{field} with a tensor on {tensor.device}; expected them on the arguments' device, as "
                        "x.new_empty(...)"
                    )
        for field in (
            "flops", "bytes_read", "bytes_written", "backward_flops", "backward_bytes_read", "backward_bytes_written",
        ):
            value = getattr(self, field)
            if value is None and field != "flops":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                return f"{field} = {value!r}; expected an integer of 0 or more"
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            return f"dtype = {self.dtype!r}; expected a torch.dtype"
        if self.name is not None and not (isinstance(self.name, str) and _NAME.fullmatch(self.name)):
            return f"name = {self.name!r}; expected \"library::kernel\""
        return ""


class _OneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name: str, kernel: Kernel, *inputs: Tensor):
        made = [tensor for tensor in (*kernel.outputs, *kernel.saved) if all(tensor is not given for given in inputs)]
        distinct = [tensor for index, tensor in enumerate(made) if all(tensor is not other for other in made[:index])]
        launch(name, inputs, distinct, kernel.flops, kernel.dtype, kernel.bytes_read, kernel.bytes_written)
        ctx.save_for_backward(*kernel.saved)
        backward_flops = 2 * kernel.flops if kernel.backward_flops is None else kernel.backward_flops
        ctx.cost = (backward_flops, kernel.dtype, kernel.backward_bytes_read, kernel.backward_bytes_written)
        ctx.kernel = name
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs]
        return tuple(kernel.outputs)

    @staticmethod
    def backward(ctx, *gradients):
        made = [
            torch.empty(shape, dtype=dtype, device=device) if needed else None
            for needed, (shape, dtype, device) in zip(ctx.needs_input_grad[2:], ctx.like)
        ]
        launch(f"{ctx.kernel}_backward", [*gradients, *ctx.saved_tensors], made, *ctx.cost)
        return None, None, *made


def _read_by(arguments: tuple) -> list[Tensor]:
    found: list[Tensor] = []
    for leaf in tree_leaves(arguments):
        found.extend(
            leaf.parameters() if isinstance(leaf, torch.nn.Module) else [leaf] if isinstance(leaf, Tensor) else []
        )
    return found


def run(function: str, returned, arguments: tuple):
    """Runs the Kernel that a stand-in for `function` (its dotted name) returned for the arguments. Any other result is
    given back as it is."""
    if not isinstance(returned, Kernel):
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(returned)):
            what = "None" if returned is None else f"a value of type {type_name(returned)} without a tensor"
            raise TracerError(
                f"the stand-in for {function} returned {what}; expected a Kernel, or tensors as the function returns "
                "them"
            )
        return returned
    inputs = _read_by(arguments) if returned.inputs is None else returned.inputs
    if problem := returned.problem(inputs):
        raise TracerError(f"the stand-in for {function} returned a Kernel with {problem}")
    library, _, base = function.rpartition(".")
    leaves, shape = tree_flatten(returned.outputs)
    returned.outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    outputs = iter(_OneKernel.apply(returned.name or f"{library.replace('.', '_')}::{base}", returned, *inputs))
    returned.temporaries = ()
    return tree_unflatten([next(outputs) if isinstance(leaf, Tensor) else leaf for leaf in leaves], shape)


def type_name(value: object) -> str:
    return "Tensor" if isinstance(value, Tensor) else type(value).__name__
