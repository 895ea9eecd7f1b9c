# SPDX-License-Identifier: Apache-2.0
"""Products of groups (mixtures of experts) in other types than bfloat16.

A device multiplies group by group there; to autograd and to the caching allocator it is the same operator with the same
result (aten/native/cuda/GroupedBlas.cpp of torch 2.11). torch's rule for fake tensors refuses the type.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import _meta_registrations as meta


def _grouped_mm(mat_a, mat_b, offs=None, bias=None, out_dtype=None):
    if mat_a.dtype == torch.bfloat16:
        return meta.meta_grouped_mm(mat_a, mat_b, offs, bias, out_dtype)
    if mat_a.dtype != mat_b.dtype:
        raise RuntimeError(f"grouped_mm of {mat_a.dtype} and {mat_b.dtype}")
    return meta._create_grouped_mm_output_tensor(mat_a, mat_b, offs, out_dtype)


@contextlib.contextmanager
def device_grouped_mm() -> Iterator[None]:
    """Inside, grouped products of every floating type work on fake tensors."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_grouped_mm", _grouped_mm, "Meta", allow_override=True)
    try:
        yield
    finally:
        library._destroy()
