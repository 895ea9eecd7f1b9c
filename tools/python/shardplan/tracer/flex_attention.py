# SPDX-License-Identifier: Apache-2.0
"""flex_attention as the one kernel that torch.compile makes of it.

Without a compiler torch runs it unfused, with the whole matrix of scores. Nobody trains so. The kernel reads queries,
keys, values and the block mask. Which blocks the mask leaves out is not known without values, so FLOPs are those of all
scores, as for causal attention.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator

import torch
from torch.nn.attention import flex_attention

from shardplan.tracer.stand_ins.launch import Kernel, run

_NAME = "aten::flex_attention"


def _attend(query, key, value, score_mod, block_mask, scale, kernel_options, *more, **options):
    batch, heads, length, width = query.shape
    keys, value_width = key.shape[2], value.shape[3]
    order = sorted(range(4), key=lambda d: query.stride(d), reverse=True)  # its result has the query's layout
    out = query.new_empty([(batch, heads, length, value_width)[d] for d in order]).permute(
        [order.index(d) for d in range(4)]
    )
    log_sum_exp = query.new_empty(batch, heads, length, dtype=torch.float32)
    masks = [t for t in block_mask if isinstance(t, torch.Tensor) and t.device.type == "cuda"]
    forward = 2 * batch * heads * length * keys * (width + value_width)
    kernel = Kernel(
        [out, log_sum_exp],
        saved=[query, key, value, out, log_sum_exp, *masks],
        flops=forward,
        backward_flops=forward * 5 // 2,  # the scores again, as in torch's other fused kernels
        name=_NAME,
        inputs=[query, key, value, *masks],
    )
    attended, statistics = run("torch.flex_attention", kernel, ())
    return attended, statistics, statistics.new_empty(0)


@contextlib.contextmanager
def device_flex_attention() -> Iterator[None]:
    """Inside, flex_attention is that kernel, compiled or not."""
    with unittest.mock.patch.object(flex_attention, "flex_attention_hop", _attend):
        yield
