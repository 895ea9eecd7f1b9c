# SPDX-License-Identifier: Apache-2.0
"""Collectives among ranks, and what they and kernels do to each other."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from shardplan.calibrate.timing import Machine, ratio

_JOIN_SECONDS = 60
_COLLECTIVES_BESIDE = 6


def start_peers(ranks: int, arguments: list[str], folder: str) -> list[subprocess.Popen]:
    """Ranks 1 and on as processes of their own, each with this program's arguments."""
    peers = []
    for rank in range(1, ranks):
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "SHARDPLAN_CALIBRATE_STORE": folder,
        }
        peers.append(
            subprocess.Popen(
                [sys.executable, "-m", "shardplan.calibrate", *arguments], env=environment, stdout=subprocess.DEVNULL
            )
        )
    return peers


def end_peers(peers: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + 10
    for peer in peers:
        try:
            peer.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            peer.kill()
            peer.wait()


def join(device: torch.device, rank: int, ranks: int) -> None:
    folder = os.environ.get("SHARDPLAN_CALIBRATE_STORE")
    if folder and not os.path.isdir(folder):  # torch would wait for it
        raise FileNotFoundError(f"the folder where the ranks meet is not there: {folder}")
    where = {"init_method": f"file://{folder}/store"} if folder else {"init_method": "env://"}
    backend = "nccl" if device.type == "cuda" else "gloo"
    device_id = device if device.type == "cuda" else None
    dist.init_process_group(
        backend, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=_JOIN_SECONDS), device_id=device_id,
        **where,
    )


def _buffers(device: torch.device, size: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    part = torch.ones(max(1, size // 4 // ranks), device=device)
    return part, torch.ones(part.numel() * ranks, device=device)


def _call(kind: str, part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup | None):
    if kind == "all-gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if kind == "reduce-scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    return lambda: dist.all_reduce(whole, group=group)


def collectives(machine: Machine, full: bool) -> Iterator[dict]:
    """Every kind on every number of ranks that divides all of them, as many groups at once as there are. Every rank
    runs this; the durations are this rank's."""
    world, rank = dist.get_world_size(), dist.get_rank()
    on_gpu = machine.device.type == "cuda"
    powers = range(12, (31 if on_gpu else 27) if full else 15)
    for ranks in [n for n in range(2, world + 1) if world % n == 0]:
        groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, world, ranks)]
        group = groups[rank // ranks]
        for power in powers:
            part, whole = _buffers(machine.device, 1 << power, ranks)
            repeats = max(2, min(50, (1 << 24 if not on_gpu else 1 << 30) >> power))
            for kind in ("all-gather", "reduce-scatter", "all-reduce"):
                if _all_say(machine, machine.out_of_time):
                    return
                row = machine.duration(_call(kind, part, whole, group), repeats)
                yield {
                    "collective": kind, "concurrent_groups": world // ranks, "ranks_per_group": ranks,
                    "full_tensor_bytes": whole.numel() * 4, **row,
                }


def _all_say(machine: Machine, stop: bool) -> bool:
    """True on all ranks when one of them stops, so that none waits for ever."""
    flag = torch.tensor([int(stop)], device=machine.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def issue_costs(machine: Machine, full: bool) -> Iterator[dict]:
    """The host's time for one collective that nobody waits for."""
    part, whole = _buffers(machine.device, 1 << 12, dist.get_world_size())
    calls = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, async_op=True),
    }
    for name, call in calls.items():
        works = []

        def issue(call=call, works=works) -> None:
            works.append(call())

        row = machine.host_ns(issue, 20 if full else 3)
        for work in works:
            work.wait()
        dist.barrier()
        yield {"what": name, **row}


def overlap(machine: Machine, full: bool) -> Iterator[dict]:
    """Rates of a product and a collective while the other runs, parts per million of alone. With one rank a copy of
    memory stands in for the collective: it is named so."""
    device = machine.device
    world = dist.get_world_size() if dist.is_initialized() else 1
    on_gpu = device.type == "cuda"
    side = (8192 if on_gpu else 256) if full else 128
    dtype = torch.bfloat16 if on_gpu else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    size = (1 << 30 if on_gpu else 1 << 25) if full else 1 << 14
    part, whole = _buffers(device, size, world)
    other = torch.empty_like(whole)
    if world > 1:
        name, call = "all-gather", _call("all-gather", part, whole, None)
    else:
        name, call = "copy", lambda: other.copy_(whole)
    product = lambda: torch.mm(a, b)  # noqa: E731
    if not on_gpu:
        if world > 1:
            yield from _overlap_on_cpu(
                machine, name, call, lambda: dist.all_gather_into_tensor(whole, part, async_op=True), product
            )
        return
    yield from _overlap_on_gpu(machine, name, call, product)


def _overlap_on_gpu(machine: Machine, name: str, call, product) -> Iterator[dict]:
    alone, call_alone = machine.duration(product, 20), machine.duration(call, 20)
    side = torch.cuda.Stream(machine.device)
    rows = {}
    for measured, companion, base, long in ((product, call, alone, call_alone), (call, product, call_alone, alone)):
        repeats = 20
        companions = 2 + 2 * repeats * base["duration_ns"] // max(1, long["duration_ns"])
        machine.synchronize()
        with torch.cuda.stream(side):
            for _ in range(int(companions)):
                companion()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            measured()
        end.record()
        end.synchronize()
        rows[measured] = {"duration_ns": max(1, round(start.elapsed_time(end) * 1e6 / repeats))}
        machine.synchronize()
    yield {
        "product": alone, "other": call_alone, "beside": name, "compute_rate_ppm": ratio(alone, rows[product]),
        "other_rate_ppm": ratio(call_alone, rows[call]),
    }


def _overlap_on_cpu(machine: Machine, name: str, call, issue, product) -> Iterator[dict]:
    """Gloo works on threads of its own: while one collective after the other is under way, products are computed. All
    ranks do it at once."""
    alone, call_alone = machine.duration(product), machine.duration(call, 3)
    rates: dict[str, list[int]] = {"product": [], "other": []}
    for _ in range(machine.samples):
        dist.barrier()
        begin, products = time.perf_counter_ns(), 0
        for _ in range(_COLLECTIVES_BESIDE):
            work = issue()
            while not work.is_completed():
                product()
                products += 1
            work.wait()
        elapsed = time.perf_counter_ns() - begin
        rates["product"].append(round(1e6 * products * alone["duration_ns"] / elapsed))
        rates["other"].append(round(1e6 * _COLLECTIVES_BESIDE * call_alone["duration_ns"] / elapsed))
    compute, other = (min(1_000_000, sorted(found)[len(found) // 2]) for found in rates.values())
    yield {"product": alone, "other": call_alone, "beside": name, "compute_rate_ppm": compute, "other_rate_ppm": other}
