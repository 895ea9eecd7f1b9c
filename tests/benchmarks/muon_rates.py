# SPDX-License-Identifier: Apache-2.0
"""Rates of the single operations that an optimizer step of Muon is made of, on CPU ranks that all measure at once, as
they step: products of matrices, elementwise work, Gloo's collectives, the host. They are rows of `shardplan calibrate`,
which makes a cluster document of them.

Load of the machine changes within seconds. So the operations are measured in rounds, between the steps that they are to
predict. A row is the median of all rounds and ranks, as the steps' are.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from shardplan.calibrate import host, ranks
from shardplan.calibrate.timing import Machine

SAMPLE_SECONDS = 0.4  # ranks that share a core take turns, and one that has slept comes first
ELEMENTWISE_BYTES = [1 << power for power in range(14, 26, 2)]
Row = tuple[tuple[str, object], ...]  # section and facts of a measurement, without the duration


def operators_of(trace: dict, shapes: Iterable[tuple[int, ...]], ranks: int) -> int:
    """Operators and collectives of steps of matrices of these shapes, cut over so many ranks."""
    steps = {tuple(step["shape"]): step for step in trace["optimizer_steps"] if step["ranks"] == ranks}
    return sum(
        event[0] == "op"
        for shape in shapes
        for part in ("update", "orthogonalize", "apply")
        for event in steps[shape][part]
    )


def traced_operations(trace: dict) -> list[list]:
    return [
        event
        for step in trace["optimizer_steps"]
        for part in ("update", "orthogonalize", "apply")
        for event in step[part]
        if event[0] == "op"
    ]


def products(trace: dict) -> list[tuple[str, int, int, int]]:
    """Each different product (operator, rows, columns, inner dimension) in bfloat16. The trace has its FLOPs, 2 m n k,
    and what it reads, m k + k n elements and with addmm m n. A flat one is not told from a tall one: it is taken as
    flat. An operand that comes twice is read once: X X^T reads m k, and X + A X reads X and the square A."""
    found = {}
    for step in trace["optimizer_steps"]:
        for event in step["orthogonalize"]:
            if event[0] != "op" or event[1] not in ("aten.mm", "aten.addmm"):
                continue
            read, outputs = (amount // torch.bfloat16.itemsize for amount in event[5:7])
            inner = event[4] // (2 * outputs)
            sides = (read - (outputs if event[1] == "aten.addmm" else 0)) // inner
            root = math.isqrt(max(0, sides * sides - 4 * outputs))
            for rows in ((sides - root) // 2, inner if sides == inner else 0, math.isqrt(outputs)):
                if rows > 0 and outputs % rows == 0 and (rows + outputs // rows == sides or rows in (sides, inner)):
                    break
            else:
                raise AssertionError(event)
            found[event[1], rows, outputs // rows, inner] = None
    return list(found)


def collectives(trace: dict, exchanged_bytes: int) -> list[tuple[str, int]]:
    """Each different collective and its bytes: those of the traced steps, and the exchange's."""
    found = {("all_to_all", exchanged_bytes // part): None for part in (1, 4)}
    for event in traced_operations(trace):
        if len(event) > 11:
            found[event[11]["kind"], event[11]["size_bytes"]] = None
    return sorted(found)


def _product(operator: str, m: int, n: int, k: int) -> Callable[[], object]:
    a, b, c = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((m, k), (k, n), (m, n)))
    return (lambda: torch.mm(a, b)) if operator == "aten.mm" else lambda: torch.addmm(c, a, b, beta=2.0, alpha=0.5)


def _collective(kind: str, size_bytes: int) -> Callable[[], object]:
    """The calls of DTensor, and sp.Muon's of an all_to_all."""
    group = dist.group.WORLD
    whole = torch.zeros(max(1, size_bytes // torch.bfloat16.itemsize), dtype=torch.bfloat16)
    if kind == "all_reduce":
        return lambda: functional.all_reduce(whole, "sum", group).wait()
    part = whole[: max(1, whole.numel() // dist.get_world_size())].clone()
    if kind == "all_gather":
        return lambda: functional.all_gather_tensor(part, 0, group).wait()
    if kind == "reduce_scatter":
        return lambda: functional.reduce_scatter_tensor(whole, "sum", 0, group).wait()
    assert kind == "all_to_all", kind
    received = torch.zeros_like(whole)
    return lambda: dist.all_to_all_single(received, whole)


class Rates:
    """Measured by the default group's ranks. tiny_step: torch.optim.Muon's step of matrices that compute nothing to
    speak of, of so many tiny_operators: what the host does for DTensor."""

    def __init__(self, trace: dict, exchanged_bytes: int, tiny_step: Callable[[], object], tiny_operators: int) -> None:
        self._tiny_step, self._tiny_operators = tiny_step, tiny_operators
        self._machine = Machine(torch.device("cpu"), float("inf"), samples=1)
        self._calls: dict[Row, Callable[[], object]] = {}
        self._repeats: dict[Row, int] = {}
        self._samples: dict[Row, list[float]] = {}
        for operator, m, n, k in products(trace):
            self._add(_product(operator, m, n, k), "matmul", dtype="bf16", batch=1, m=m, n=n, k=k, of=operator)
        for size in ELEMENTWISE_BYTES:
            x, y = (torch.randn(size // 4) for _ in range(2))
            self._add(x.clone, "memory", operator="copy", bytes_read=size, bytes_written=size)
            self._add(lambda x=x, y=y: x.add_(y), "memory", operator="add", bytes_read=2 * size, bytes_written=size)
        for kind, size in collectives(trace, exchanged_bytes):
            self._add(
                _collective(kind, size), "collectives", collective=kind.replace("_", "-"), concurrent_groups=1,
                ranks_per_group=dist.get_world_size(), full_tensor_bytes=size,
            )

    def _add(self, call: Callable[[], object], section: str, **facts) -> None:
        self._calls[("section", section), *facts.items()] = call

    def round(self) -> None:
        """Collective."""
        for row, call in self._calls.items():
            dist.barrier()
            if row not in self._repeats:
                call()
                self._repeats[row] = self._agreed(self._seconds(call, 1))
                dist.barrier()
            self._took(row, self._seconds(call, self._repeats[row]) * 1e9)
        for section, measure in (("host", host.costs), ("issue", ranks.issue_costs)):
            dist.barrier()
            for measured in measure(self._machine, True):
                if measured["what"] != "optimizer_operator":  # of AdamW's loop
                    self._took((("section", section), ("what", measured["what"])), measured["duration_ns"])
        dist.barrier()
        self._took((("section", "host"), ("what", "optimizer_operator")), self._tiny_operator_ns())

    def _tiny_operator_ns(self) -> float:
        """The thread's seconds of CPU, without its waits for other ranks; as long as its CPU is another rank's, too."""
        square = torch.randn(256, 256)
        begin = time.perf_counter(), time.thread_time()
        while time.perf_counter() - begin[0] < SAMPLE_SECONDS:
            square @ square
        shared = (time.perf_counter() - begin[0]) / (time.thread_time() - begin[1])
        dist.barrier()
        started = time.thread_time()
        self._tiny_step()
        return (time.thread_time() - started) * shared * 1e9 / self._tiny_operators

    def _took(self, row: Row, duration_ns: float) -> None:
        self._samples.setdefault(row, []).append(duration_ns)

    @staticmethod
    def _seconds(call: Callable[[], object], repeats: int) -> float:
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - begin) / repeats

    @staticmethod
    def _agreed(seconds: float) -> int:
        """Repeats of a call, the same on all ranks."""
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return max(1, min(1000, round(SAMPLE_SECONDS / slowest.item())))

    def samples(self) -> dict[Row, list[float]]:
        return self._samples


def measurements(of_ranks: list[dict[Row, list[float]]]) -> dict:
    """The document that `shardplan calibrate --from` takes."""
    document = {
        "schema": "shardplan.measured/1",
        "device": {
            "kind": "cpu", "name": "CPU ranks", "torch": torch.__version__,
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "ranks": len(of_ranks), "ranks_per_node": len(of_ranks),
    }
    for section, facts, durations in _rows(of_ranks):
        entry = facts | {
            "duration_ns": max(1, round(statistics.median(durations))), "least_ns": max(1, round(min(durations))),
            "most_ns": max(1, round(max(durations))),
        }
        document.setdefault(section, []).append(entry)
    return document | {"failed": [], "whole": True}


def _rows(of_ranks: list[dict[Row, list[float]]]) -> Iterator[tuple[str, dict, list[float]]]:
    for row in of_ranks[0]:
        (_, section), *facts = row
        yield str(section), dict(facts), [duration for rank in of_ranks for duration in rank[row]]
