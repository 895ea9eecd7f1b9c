# SPDX-License-Identifier: Apache-2.0
"""The tensors in what modules are given and return, as the installed FSDP2 finds them.

Since torch 2.15 it looks into named tuples, dataclasses, dicts, lists and tuples. Before, into what torch.utils._pytree
knows.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


@functools.cache
def _own_walk() -> types.ModuleType | None:
    """The module of FSDP2's own functions for containers; None: it asks pytree."""
    from torch.distributed.fsdp import _common_utils

    return _common_utils if hasattr(_common_utils, "replace_grad_tensors") else None


def tensors_in(value: Any) -> list[torch.Tensor]:
    """In the order in which FSDP2 finds them; those that need no gradient, too."""
    if _own_walk() is None:
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, tuple)):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    else:
        return []
    return [tensor for part in parts for tensor in tensors_in(part)]


def with_grad_tensors(value: Any, replacements: list[torch.Tensor]) -> Any:
    """A copy whose tensors that need a gradient are these, in the order of tensors_in."""
    if (walk := _own_walk()) is not None:
        return walk.replace_grad_tensors(value, iter(replacements))
    leaves, spec = tree_flatten(value)
    remaining = iter(replacements)
    needs = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
    return tree_unflatten([next(remaining) if need else leaf for leaf, need in zip(leaves, needs)], spec)
