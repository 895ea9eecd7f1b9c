# SPDX-License-Identifier: Apache-2.0
"""Kernels of one device, each by the sizes that its time depends on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from shardplan.calibrate.timing import Machine

_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_COLD_BYTES, _MOST_COPIES = 1 << 26, 64
_MEMORY_SHARE = 0.3  # of the device's memory that one measurement takes


def _fits(machine: Machine, size_bytes: int) -> bool:
    if machine.device.type == "cuda":
        return size_bytes < _MEMORY_SHARE * torch.cuda.mem_get_info(machine.device)[0]
    return size_bytes < 1 << 30


def _each(machine: Machine, cases: list, measure: Callable) -> Iterator[dict]:
    for case in cases:
        if machine.out_of_time:
            return
        row = measure(*case)
        if row is not None:
            yield row


def _copies(on_gpu: bool, size_bytes: int) -> int:
    """A layer's weights come from memory: a core's caches hold those of a loop over one layer, and would be
    measured."""
    return 1 if on_gpu else max(1, min(_MOST_COPIES, _COLD_BYTES // size_bytes))


def matmuls(machine: Machine, full: bool) -> Iterator[dict]:
    """Products with weights as linear layers have them, by elements of the output and inner dimension."""
    on_gpu = machine.device.type == "cuda"
    rows = (128, 256, 1024, 4096, 16384) if on_gpu else (64, 256, 1024, 4096)
    columns = (256, 1024, 4096, 14336) if on_gpu else (64, 256, 1024, 4096)
    inner = (128, 256, 1024, 4096, 14336) if on_gpu else (64, 256, 1024, 4096)
    if not full:
        rows, columns, inner = rows[:2], columns[:2], inner[:2]
    dtypes = ("bf16", "f32") if on_gpu else ("f32", "bf16")
    cases = [(d, m, n, k) for d in dtypes for m in rows for n in columns for k in inner]
    if not on_gpu:  # a second of a core does some 5e10
        cases = [case for case in cases if case[1] * case[2] * case[3] <= (1 << 32 if case[0] == "f32" else 1 << 28)]

    def measure(dtype: str, m: int, n: int, k: int) -> dict | None:
        kind = _DTYPES[dtype]
        if not _fits(machine, kind.itemsize * (m * n + m * k + n * k)):
            return None
        a = torch.randn(m, k, device=machine.device, dtype=kind)
        weights = itertools.cycle(
            [
                torch.randn(n, k, device=machine.device, dtype=kind)
                for _ in range(_copies(on_gpu, n * k * kind.itemsize))
            ]
        )
        return {
            "dtype": dtype, "batch": 1, "m": m, "n": n, "k": k, **machine.duration(lambda: F.linear(a, next(weights))),
        }

    yield from _each(machine, cases, measure)


def attention(machine: Machine, full: bool) -> Iterator[dict]:
    on_gpu = machine.device.type == "cuda"
    lengths = (512, 1024, 2048, 4096, 8192, 16384) if on_gpu else (64, 256, 1024)
    heads = ((16, 64), (8, 128)) if on_gpu else ((4, 64),)
    if not full:
        lengths, heads = lengths[:2], heads[:1]
    dtype = torch.bfloat16 if on_gpu else torch.float32
    cases = [(seq, count, size, causal) for count, size in heads for seq in lengths for causal in (True, False)]

    def measure(seq: int, count: int, size: int, causal: bool) -> dict:
        q, k, v = (
            torch.randn(1, count, seq, size, device=machine.device, dtype=dtype, requires_grad=True) for _ in range(3)
        )
        with torch.no_grad():
            forward = machine.duration(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        grad = torch.randn_like(out)
        backward = machine.duration(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
        name = str(dtype).removeprefix("torch.")
        return {
            "dtype": name, "batch": 1, "heads": count, "seq": seq, "head_size": size, "causal": causal,
            "forward": forward, "backward": backward,
        }

    yield from _each(machine, cases, measure)


def memory_bound(machine: Machine, full: bool) -> Iterator[dict]:
    """Elementwise kernels and normalisations, by the bytes that they move."""
    on_gpu = machine.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    top = (31 if on_gpu else 27) if full else 17
    width = 4096
    sizes = [1 << p for p in range(14, top)]

    def operations(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, weight: torch.Tensor) -> dict:
        size = x.numel() * x.element_size()
        return {
            "copy": (lambda: out.copy_(x), size, size),
            "add": (lambda: torch.add(x, y, out=out), 2 * size, size),
            "silu": (lambda: F.silu(x), size, size),
            "cast": (
                lambda: x.to(torch.float32 if on_gpu else torch.bfloat16), size, size * 2 if on_gpu else size // 2,
            ),
            "rms_norm": (lambda: F.rms_norm(x, (width,), weight), size, size),
            "layer_norm": (lambda: F.layer_norm(x, (width,), weight, weight), size, size),
            "softmax": (lambda: F.softmax(x, -1), size, size),
        }

    for size in sizes:
        if machine.out_of_time:
            return
        if not _fits(machine, 5 * size):
            continue
        x = torch.randn(max(1, size // dtype.itemsize // width), width, device=machine.device, dtype=dtype)
        work = operations(
            x, torch.randn_like(x), torch.empty_like(x), torch.ones(width, device=machine.device, dtype=dtype)
        )
        for name, (call, read, written) in work.items():
            yield {"operator": name, "bytes_read": read, "bytes_written": written, **machine.duration(call)}


def optimizers(machine: Machine, full: bool) -> Iterator[dict]:
    on_gpu = machine.device.type == "cuda"
    sizes = (1 << 20, 1 << 24, 1 << 27) if on_gpu else (1 << 16, 1 << 20, 1 << 22)
    cases = [
        (way, numel, count)
        for way in ("foreach", "fused")
        for numel in (sizes if full else sizes[:1])
        for count in (1, 16)
    ]

    def measure(way: str, numel: int, count: int) -> dict | None:
        if not _fits(machine, numel * 24):
            return None
        parameters = [torch.nn.Parameter(torch.randn(numel // count, device=machine.device)) for _ in range(count)]
        for p in parameters:
            p.grad = torch.randn_like(p)
        optimizer = torch.optim.AdamW(parameters, **{way: True})
        return {
            "optimizer": "adamw", "implementation": way, "tensors": count,
            "parameter_bytes": numel // count * count * 4, **machine.duration(optimizer.step),
        }

    yield from _each(machine, cases, measure)


def host_copies(machine: Machine, full: bool) -> Iterator[dict]:
    """Between device and pinned memory; on a CPU, one buffer to another."""
    on_gpu = machine.device.type == "cuda"
    for power in range(16, (30 if on_gpu else 27) if full else 18, 2):
        if machine.out_of_time:
            return
        host = torch.empty(1 << power, dtype=torch.uint8, pin_memory=on_gpu)
        device = torch.empty(1 << power, dtype=torch.uint8, device=machine.device)
        for direction, call in (
            ("to_device", lambda: device.copy_(host, non_blocking=True)),
            ("to_host", lambda: host.copy_(device, non_blocking=True)),
        ):
            yield {"direction": direction, "size_bytes": 1 << power, **machine.duration(call)}


def sustained(machine: Machine, full: bool) -> Iterator[dict]:
    """One large product again and again: what a power limit leaves of the clock after some time."""
    on_gpu = machine.device.type == "cuda"
    side, dtype = ((8192, torch.bfloat16) if on_gpu else (1024, torch.float32)) if full else (128, torch.float32)
    a, b = (torch.randn(side, side, device=machine.device, dtype=dtype) for _ in range(2))
    for _ in range(20 if full else 2):
        if machine.out_of_time:
            return
        yield {
            "m": side, "dtype": str(dtype).removeprefix("torch."),
            **machine.duration(lambda: torch.mm(a, b), 50 if on_gpu and full else 2),
        }
