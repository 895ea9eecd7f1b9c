# SPDX-License-Identifier: Apache-2.0
"""Kernels of Triton on two streams that nothing orders: triton_streams.py reads|writes what they share."""

import sys

import torch
import triton
import triton.language as tl

COUNT = 1024


@triton.jit
def add(x, y, out, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(out + at, tl.load(x + at) + tl.load(y + at))


shared, first, second = (torch.zeros(COUNT, device="cuda") for _ in range(3))
other = torch.cuda.Stream()
other.wait_stream(torch.cuda.current_stream())
add[(1,)](shared, shared, first, block=COUNT)
with torch.cuda.stream(other):
    add[(1,)](shared, second, shared if sys.argv[1] == "writes" else second, block=COUNT)
torch.cuda.synchronize()
