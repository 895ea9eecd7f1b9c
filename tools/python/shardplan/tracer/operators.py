# SPDX-License-Identifier: Apache-2.0
"""Cost of one dispatched operator: its kind, FLOPs, bytes read and written.

FLOPs are those of torch.utils.flop_counter (matrix products, convolutions, attention); every other operator counts 0,
as there. Bytes are those of the tensors that a kernel has to touch. A view counts its own elements, not its whole
storage; an expanded dimension counts once; a lookup counts the rows it fetches, not the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch.utils.flop_counter import flop_registry

from shardplan.tracer import collectives
from shardplan.tracer.recurrent import flops as recurrent_flops
from shardplan.tracer.stand_ins.launch import declared_cost, is_declared

aten = torch.ops.aten

# Storage without a kernel.
_ALLOCATE_ONLY = frozenset("empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split())
# The result depends on the arguments' shape only.
_READS_NOTHING = frozenset(
    "zeros_like ones_like full_like new_zeros new_ones new_full rand_like randn_like zero_ fill_ uniform_ normal_ "
    "bernoulli_".split()
)
# Argument positions of which only as many elements are read as the output has (the table of a lookup).
_LOOKUPS = {"embedding": 0, "index_select": 0, "gather": 0, "index": 0, "nll_loss_forward": 0, "take": 0}
# Argument positions that are there for their shape.
_UNREAD = {
    "nll_loss_backward": (1,),
    "native_dropout_backward": (),
    "copy_": (0,),
    "slice_backward": (),
    "select_backward": (),
}
_ATTENTION = frozenset(
    f"_scaled_dot_product_{kernel}_attention{suffix}"
    for kernel in ("flash", "efficient", "cudnn")
    for suffix in ("", "_backward")
) | {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"}

# Formulas that the registry of torch 2.11 lacks.
_SAME_FORMULA = {
    f"_scaled_dot_product_flash_attention_for_cpu{suffix}": getattr(
        aten, f"_scaled_dot_product_flash_attention{suffix}"
    )
    for suffix in ("", "_backward")
}

_DTYPE_NAMES = frozenset(
    "float64 float32 bfloat16 float16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool complex64 "
    "complex128 complex32 uint16 uint32 uint64 "
    "float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu".split()
)


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without "torch."; an unnamed type is given as one of its size."""
    name = str(dtype).removeprefix("torch.")
    if name in _DTYPE_NAMES:
        return name
    return {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}.get(dtype.itemsize, "uint8")


def tensors_in(value, into: list) -> list:
    """Appends every tensor of a nest of lists, tuples and dicts, in order."""
    if isinstance(value, torch.Tensor):
        into.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            tensors_in(item, into)
    elif isinstance(value, dict):
        for item in value.values():
            tensors_in(item, into)
    return into


def touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements of a view, an expanded dimension counted once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride()):
        if stride != 0 or size == 0:
            count *= size
    return count


def dense_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclass
class Operator:
    """Facts about an operator that do not depend on its arguments."""

    name: str  # "aten.mm"
    base: str  # "mm"
    allocate_only: bool
    mutable: bool
    written_positions: tuple[int, ...]
    written_names: tuple[str, ...]
    flop_formula: object = None
    collective: collectives.Arguments | None = None  # what the schema does not say of it
    kind: str = ""  # of a collective that moves something
    declared: bool = False  # the kernel of a stand-in: its arguments say what it costs
    flop_cache: dict = field(default_factory=dict)


def describe(func) -> Operator:
    """Raises collectives.UnknownCollective."""
    collective = collectives.arguments(func)
    schema = func._schema
    base = func._overloadpacket.__name__
    positions, names = [], []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            names.append(argument.name)
            if not argument.kwarg_only:
                positions.append(index)
    return Operator(
        name=f"{func.namespace}.{base}",
        base=base,
        allocate_only=base in _ALLOCATE_ONLY,
        mutable=schema.is_mutable or (collective is not None and not collective.makes_results),
        written_positions=tuple(positions),
        written_names=tuple(names),
        flop_formula=flop_registry.get(func._overloadpacket) or flop_registry.get(_SAME_FORMULA.get(base)),
        collective=collective,
        kind=collectives.kind_of(func),
        declared=is_declared(func),
    )


def _freeze(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item) for item in value)
    return value


def _full_heads(args: tuple, backward: bool) -> tuple:
    """Grouped key/value heads count as if repeated: the formula asks for equal head counts, the products are the
    same."""
    first = 1 if backward else 0
    query, key, value = args[first : first + 3]
    heads = query.shape[1]
    if key.shape[1] == heads == value.shape[1]:
        return args
    shapes = [torch.Size((t.shape[0], heads, *t.shape[2:])) for t in (key, value)]
    return (*args[: first + 1], *shapes, *args[first + 3 :])


def _grouped_mm_flops(left, right) -> int:
    """Every row of one side goes through one group's matrix, whatever the grouping: 2 x rows x inner x columns."""
    if left.dim() == 2 and right.dim() == 3:
        return 2 * left.shape[0] * left.shape[1] * right.shape[2]
    if left.dim() == 3 and right.dim() == 2:
        return 2 * left.shape[1] * left.shape[2] * right.shape[1]
    if left.dim() == 2 and right.dim() == 2:
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return 2 * left.shape[0] * left.shape[1] * left.shape[2] * right.shape[2]


def flops(operator: Operator, args: tuple, kwargs: dict, out) -> int:
    if operator.declared:
        return declared_cost(args).flops
    if operator.base == "_grouped_mm":
        return _grouped_mm_flops(args[0], args[1])
    if (recurrent := recurrent_flops(operator.base, args)) is not None:
        return recurrent
    if operator.flop_formula is None:
        return 0
    key = (_freeze(args), tuple((name, _freeze(value)) for name, value in kwargs.items()), _freeze(out))
    count = operator.flop_cache.get(key)
    if count is None:
        if operator.base in _ATTENTION:
            args = _full_heads(args, operator.base.endswith("_backward"))
        count = int(operator.flop_formula(*args, **kwargs, out_val=out))
        operator.flop_cache[key] = count
    return count


def arithmetic_dtype(inputs: list, outputs: list) -> str:
    """That of the floating input with the most elements (statistics and scalars do not decide); without one of such an
    output; else the first tensor's."""
    for tensors in (inputs, outputs):
        floating = [t for t in tensors if t.dtype.is_floating_point or t.dtype.is_complex]
        if floating:
            return dtype_name(max(floating, key=torch.Tensor.numel).dtype)
    tensors = inputs or outputs
    return dtype_name(tensors[0].dtype)


def dtype_of(operator: Operator, args: tuple, inputs: list, outputs: list) -> str:
    """`arithmetic_dtype`, or what a stand-in says instead."""
    declared = declared_cost(args).dtype if operator.declared else None
    return arithmetic_dtype(inputs, outputs) if declared is None else dtype_name(declared)


def read_tensors(operator: Operator, args: tuple, kwargs: dict, outputs: list) -> list[tuple[torch.Tensor, int]]:
    """(tensor, bytes read of it) for each tensor argument that is read, in order."""
    if operator.collective is not None:
        read, _ = collectives.accessed(operator.name, operator.collective, args)
        return [(tensor, touched_bytes(tensor)) for tensor in tensors_in(read, [])]
    if operator.base in _READS_NOTHING:
        return []
    lookup = _LOOKUPS.get(operator.base, -1)
    unread = _UNREAD.get(operator.base, ())
    result = []
    for position, argument in enumerate(args[:1] if operator.declared else args):
        if position in unread:
            continue
        found = tensors_in(argument, [])
        for tensor in found:
            count = touched_bytes(tensor)
            if position == lookup:
                rows = max((o.numel() for o in outputs), default=0)
                if operator.base == "nll_loss_forward":
                    rows = args[1].numel()
                count = min(count, rows * tensor.element_size())
            result.append((tensor, count))
    for name, value in kwargs.items():
        if name == "out" and name in operator.written_names:
            continue
        result.extend((tensor, touched_bytes(tensor)) for tensor in tensors_in(value, []))
    return result


def bytes_moved(operator: Operator, args: tuple, read: int, written: int) -> tuple[int, int]:
    """`read` and `written`, which the tensors make, or what a stand-in says instead."""
    if not operator.declared:
        return read, written
    cost = declared_cost(args)
    return (read if cost.bytes_read is None else cost.bytes_read), (
        written if cost.bytes_written is None else cost.bytes_written
    )


def written_arguments(operator: Operator, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    if operator.collective is not None:
        _, written = collectives.accessed(operator.name, operator.collective, args)
        return tensors_in(written, [])
    found: list = []
    for position in operator.written_positions:
        if position < len(args):
            tensors_in(args[position], found)
    for name in operator.written_names:
        if name in kwargs:
            tensors_in(kwargs[name], found)
    return found


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a block without gaps or overlaps, in some order of the dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride()) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return math.prod(tensor.shape) > 0
