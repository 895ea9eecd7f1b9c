# SPDX-License-Identifier: Apache-2.0
"""Programs that lack a wait, or free too early, and their sums. Each sum is 3 * 2^20 where nothing races."""

import json

import torch

SIZE = 1 << 20


def unordered() -> float:
    side = torch.cuda.Stream()
    weights = torch.zeros(SIZE, device="cuda")
    torch.cuda.synchronize()
    weights.fill_(3.0)
    with torch.cuda.stream(side):
        doubled = weights * 1.0
    torch.cuda.synchronize()
    return float(doubled.sum())


def not_awaited() -> float:
    side = torch.cuda.Stream()
    ones = torch.ones(SIZE, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        result = ones * 3.0
    total = result * 1.0
    torch.cuda.synchronize()
    return float(total.sum())


def freed() -> float:
    side = torch.cuda.Stream()
    total = torch.zeros(SIZE, device="cuda")
    threes = torch.full((SIZE,), 3.0, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        total.add_(threes)
    del threes
    other = torch.full((SIZE,), 7.0, device="cuda")
    torch.cuda.synchronize()
    return float(total.sum()) + 0 * float(other[0])


def offloaded() -> float:
    threes = torch.full((SIZE,), 3.0, device="cuda")
    on_host = torch.zeros(SIZE, pin_memory=True)
    on_host.copy_(threes, non_blocking=True)
    total = float(on_host.sum())
    torch.cuda.synchronize()
    return total


print(json.dumps({case.__name__: case() for case in (unordered, not_awaited, freed, offloaded)}))
