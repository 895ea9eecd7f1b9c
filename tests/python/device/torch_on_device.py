# SPDX-License-Identifier: Apache-2.0
"""Functions that run on the device in software: `python torch_on_device.py NAME...` prints their results as JSON."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.nn.functional as F

TRIALS = 20


def _train(device: str) -> dict[str, list[float]]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Embedding(17, 12),
        torch.nn.LayerNorm(12),
        torch.nn.Linear(12, 24),
        torch.nn.GELU(),
        torch.nn.Linear(24, 17),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(5):
        tokens = torch.randint(17, (4, 6), generator=generator).to(device)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses} | {name: p.detach().cpu().flatten().tolist() for name, p in model.named_parameters()}


def training() -> list[str]:
    """The names of what differs from the same training on the CPU."""
    host, device = _train("cpu"), _train("cuda")
    return [name for name in host if host[name] != device[name]]


def operators() -> list[str]:
    """Results that differ from the CPU's, bit for bit."""
    torch.manual_seed(1)
    x, y, i = torch.randn(5, 7), torch.randn(7, 3), torch.tensor([4, 0, 2])
    calls = {
        "matmul": lambda x, y, i: x @ y,
        "out": lambda x, y, i: torch.add(x, 2.5, out=torch.empty(0, device=x.device)),
        "in place on a view": lambda x, y, i: x.clone().t()[1:4].mul_(3),
        "half": lambda x, y, i: (x.bfloat16() * 1.7).float(),
        "wrapped number": lambda x, y, i: x.bfloat16() + torch.tensor(1.0, dtype=torch.float64),
        "several outputs": lambda x, y, i: torch.sort(x, dim=1)[1].float(),
        "index": lambda x, y, i: x[i],
        "index with indices of the host": lambda x, y, i: x[i.cpu()],
        "shape by numbers": lambda x, y, i: torch.nonzero(x > 0).float(),
        "masked": lambda x, y, i: x[x > 0],
        "foreach": lambda x, y, i: torch._foreach_add([x, x * 2], [x, x], alpha=2)[1],
        "attention": lambda x, y, i: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
        "convolution": lambda x, y, i: F.conv1d(x[None], y.t()[None, :, :5].transpose(1, 2)),
        "layer norm in low precision": lambda x, y, i: F.layer_norm(x.bfloat16(), (7,)).float(),
        "batch norm": lambda x, y, i: F.batch_norm(x, None, None, training=True),
        "complex": lambda x, y, i: torch.view_as_real(torch.fft.rfft(x)),
        "where": lambda x, y, i: torch.where(x > 0, x, -1.0),
        "cat": lambda x, y, i: torch.cat([x, x[:2]], 0),
        "conversion on the way": lambda x, y, i: x.t().to("cpu", torch.float16).float(),
    }
    differ = []
    for name, call in calls.items():
        host = call(x, y, i)
        device = call(*(t.cuda() for t in (x, y, i)))
        if not torch.equal(host, device.cpu()):
            differ.append(name)
    return differ


def random_numbers() -> dict[str, bool]:
    torch.cuda.manual_seed(7)
    first = torch.rand(100, device="cuda")
    state = torch.cuda.get_rng_state()
    second = F.dropout(torch.ones(1000, device="cuda"), 0.25)
    torch.cuda.set_rng_state(state)
    again = F.dropout(torch.ones(1000, device="cuda"), 0.25)
    torch.cuda.manual_seed(7)
    return {
        "a seed is a sequence": torch.equal(first, torch.rand(100, device="cuda")),
        "which goes on": not torch.equal(first, torch.rand(100, device="cuda")),
        "a state is a place in it": torch.equal(second, again),
        "dropout drops": 650 < int((second > 0).sum()) < 850 and abs(second.max().item() - 4 / 3) < 1e-6,
    }


def allocator() -> dict[str, int]:
    """Bytes as the real caching allocator counts them."""
    kept = torch.empty(1000, device="cuda")
    freed = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    del freed
    other = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    found = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    del other
    torch.cuda.empty_cache()
    found["reserved by a small block"] = torch.cuda.memory_reserved()
    free, total = torch.cuda.mem_get_info()
    found["used of the device"] = total - free
    try:
        torch.empty(81 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        found["out of memory"] = 1
    assert kept.numel() == 1000
    return found


def mistakes() -> dict[str, str]:
    said = {}
    try:
        torch.ones(2, device="cuda") + torch.ones(2)
    except RuntimeError as error:
        said["mixed devices"] = str(error).splitlines()[0]
    try:
        torch.cuda._sleep(10)
    except RuntimeError as error:
        said["no such kernel"] = str(error).splitlines()[0]
    try:
        F.embedding(torch.tensor([9], device="cuda"), torch.ones(3, 2, device="cuda")).sum().item()
    except RuntimeError as error:
        said["index out of range"] = str(error).splitlines()[0]
    return said


def _on_a_side_stream(waits: bool) -> bool:
    """Is a side stream's sum right?"""
    side = torch.cuda.Stream()
    x = torch.zeros(64, device="cuda")
    torch.cuda.synchronize()
    x += 1
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = x.sum()
    side.synchronize()
    return total.item() == 64


def _memory_used_by_a_side_stream(recorded: bool) -> bool:
    """Is a side stream's sum right of memory that is freed meanwhile?"""
    side = torch.cuda.Stream()
    x = torch.ones(64, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = x.sum()
    if recorded:
        x.record_stream(side)
    del x
    y = torch.full((64,), 3.0, device="cuda")  # the same block, if it is free
    torch.cuda.current_stream().synchronize()
    side.synchronize()
    return y.sum().item() == 192 and total.item() == 64


def order() -> dict[str, list[bool]]:
    """Whether each of many trials computes the right values."""
    return {
        "waited": [_on_a_side_stream(True) for _ in range(TRIALS)],
        "not waited": [_on_a_side_stream(False) for _ in range(TRIALS)],
        "recorded": [_memory_used_by_a_side_stream(True) for _ in range(TRIALS)],
        "not recorded": [_memory_used_by_a_side_stream(False) for _ in range(TRIALS)],
    }


if __name__ == "__main__":
    print(json.dumps({name: globals()[name]() for name in sys.argv[1:]}), flush=True)
    os._exit(0)  # a broken device cannot free its tensors
