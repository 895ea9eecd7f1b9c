# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of what was recorded, by torch's own formulas (torch.utils.flop_counter)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import ModuleType

# Formulas take the arguments of the operator; a recording has its tensors. These have others before the last.
_CONVOLUTIONS = {"convolution", "_convolution", "cudnn_convolution", "_slow_conv2d_forward", "slow_conv_dilated2d"}
_NOT_TRANSPOSED = (None, None, None, None, False)


def _kernels(path: str, names: set[str]) -> Iterator[tuple[str, list, list]]:
    with open(path, encoding="utf-8", errors="backslashreplace") as file:
        for line in file:
            if not line.startswith('["kernel"') or not line.endswith("\n"):
                continue
            _, _, _, _, name, reads, writes, *_ = json.loads(line)
            if name in names:
                yield name, [r["shape"] for r in reads], [w["shape"] for w in writes]


def signature(name: str, reads: list, writes: list) -> str:
    return json.dumps([name, reads, writes], separators=(",", ":"))


def of_recorded(torch: ModuleType, path: str) -> dict[str, int]:
    """By signature. Operators without a formula have none: they count 0."""
    from torch.utils.flop_counter import flop_registry

    formulas = {
        packet._qualified_op_name: formula for packet, formula in flop_registry.items() if hasattr(packet, "overloads")
    }
    formulas.setdefault("aten::_grouped_mm", _grouped_mm)
    counted: dict[str, int] = {}
    for name, reads, writes in _kernels(path, set(formulas)):
        key = signature(name, reads, writes)
        if key not in counted:
            counted[key] = _count(torch, formulas[name], name, reads, writes)
    return counted


def _count(torch: ModuleType, formula, name: str, reads: list, writes: list) -> int:
    shapes = [torch.Size(shape) for shape in reads]
    if name.partition("::")[2] in _CONVOLUTIONS:
        shapes = [*shapes[:2], *_NOT_TRANSPOSED]
    out = torch.empty(writes[0], device="meta") if writes else None
    try:
        return int(formula(*shapes, out_val=out))
    except (TypeError, ValueError, IndexError, AssertionError, AttributeError):
        return 0  # the formula wants what a recording has not


def _grouped_mm(left, right, *_others, out_val=None) -> int:
    """A group is a range of rows: each row meets one matrix. Gradients of the matrices are products along the rows:
    each column meets one."""
    if len(left) == 2 and len(right) == 3:
        return 2 * left[0] * left[1] * right[2]
    if len(left) == 2 and len(right) == 2:
        return 2 * left[0] * left[1] * right[1]
    batch = left[0] if len(left) == 3 else 1
    return 2 * batch * left[-2] * left[-1] * right[-1]
