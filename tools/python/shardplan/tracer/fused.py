# SPDX-License-Identifier: Apache-2.0
"""Operators of a compiled graph that one generated kernel runs.

Inductor generates code for all operators but products, attention and what it calls as it is, and fuses them with what
they read from or write to. Here a run of such operators is one kernel. Values that only they pass to each other are
never in memory; everything else is read and written once. Inductor does not fuse across some reductions, and fuses some
operators that are no neighbours: it may have more kernels or fewer.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx

from shardplan.tracer.collectives import is_collective
from shardplan.tracer.operators import Operator, describe

# Limits of inductor's recomputation: realize_reads_threshold, and realize_opcount_threshold, which counts reads,
# constants and casts, too.
_MOST_READ = 4
_MOST_OPERATORS = 16
KERNEL = "compiled.elementwise"  # as the planner's pass fuse_operators calls it


def is_generated(func, described: Operator) -> bool:
    """Whether inductor generates code for this operator, or none is needed (a view)."""
    from torch._inductor import lowering

    if is_collective(func):
        return False
    return described.flop_formula is None and func in lowering.lowerings and func not in lowering.fallbacks


def gather(graph: fx.Graph) -> None:
    """Moves what is generated next to what it can be fused with, and computes it again there where inductor does:

        a = mm(x); b = exp(a); c = mm(x); d = mul(b, c)    ->    a = mm(x); c = mm(x); b = exp(a); d = mul(b, c)

    A connected part of a run moves as a whole, so it passes on no more tensors than before. It moves only if an
    operator of a later run is the first to use it.
    """
    _repeat(graph)
    graph.eliminate_dead_code()
    node = next(iter(graph.nodes))
    while node.op != "output":
        run = []
        while _may_move(node):
            run.append(node)
            node = node.next
        for part in _connected(run):
            _move(part)
        if node.op != "output":
            node = node.next


def _may_move(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return _may_move(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return not node.target._schema.is_mutable and is_generated(node.target, describe(node.target))


def _repeat(graph: fx.Graph) -> None:
    """Inductor writes an elementwise operator into every kernel that reads its result, where that is cheap and nothing
    else needs the result in memory (TensorBox.mark_reuse). Here each run that reads it gets a copy."""
    runs: dict[fx.Node, int] = {}
    run = 0
    for node in graph.nodes:
        if _may_move(node):
            runs[node] = run
        else:
            run += 1
    for node in list(runs):
        others: dict[int, list[fx.Node]] = {}
        for user in node.users:
            if runs.get(user, runs[node]) != runs[node]:
                others.setdefault(runs[user], []).append(user)
        chain = _chain(node, runs) if others and _is_elementwise(node) and not _in_memory(node, runs) else []
        for users in others.values() if chain else ():
            copies: dict[fx.Node, fx.Node] = {}
            first = min(users)
            with graph.inserting_before(first):
                for member in chain:
                    copies[member] = graph.node_copy(member, lambda n: copies.get(n, n))
                    runs[copies[member]] = runs[first]
            for user in users:
                user.replace_input_with(node, copies[node])


def _is_elementwise(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and any(
        result.alias_info is not None for result in node.target._schema.returns
    )


def _in_memory(node: fx.Node, runs: dict[fx.Node, int]) -> bool:
    """Whether something that no kernel is generated for reads it."""
    return any(user not in runs or (_is_view(user) and _in_memory(user, runs)) for user in node.users)


def _chain(node: fx.Node, runs: dict[fx.Node, int]) -> list[fx.Node]:
    """The node behind those of its run that have to be computed again with it; []: too many, or too many tensors to be
    read for it."""
    chain, read = {node}, set()
    waiting = [node]
    while waiting:
        for before in waiting.pop().all_input_nodes:
            if (
                runs.get(before) != runs[node]
                or not (_is_elementwise(before) or _is_view(before))
                or _in_memory(before, runs)
            ):
                read.add(before)
            elif before not in chain:
                chain.add(before)
                waiting.append(before)
    return sorted(chain) if len(read) <= _MOST_READ and len(chain) <= _MOST_OPERATORS else []


def _connected(run: list[fx.Node]) -> list[list[fx.Node]]:
    """The run in parts that pass nothing to each other."""
    label = {node: node for node in run}
    for node in run:
        for before in node.all_input_nodes:
            if before in label:
                label = {member: label[node] if own is label[before] else own for member, own in label.items()}
    parts: dict[fx.Node, list[fx.Node]] = {}
    for node in run:
        parts.setdefault(label[node], []).append(node)
    return list(parts.values())


def _move(part: list[fx.Node]) -> None:
    users = {user for node in part for user in node.users if user.op != "output"} - set(part)
    first = part[-1].next
    while users and first not in users:
        first = first.next
    if users and _may_move(first):
        for node in part:
            first.prepend(node)


class View(NamedTuple):
    """A tensor that an operator reads."""

    of: tuple[int, int]  # storage and -1, or -1 and parameter
    place: tuple  # of its elements there
    bytes_read: int
    size_bytes: int  # of the storage


@dataclass
class Kernel:
    """A run of operators while it is recorded. `begin`: of its events among the recorder's, which are births and deaths
    alone."""

    begin: int
    operators: list[list] = field(default_factory=list)  # their events, as they would be alone
    # Made by others: storage or parameter -> views -> bytes.
    read: dict[tuple, dict[tuple, int]] = field(default_factory=dict)
    sizes: dict[tuple, int] = field(default_factory=dict)  # of what is read, bytes
    written: dict[int, int] = field(default_factory=dict)  # storages -> bytes

    def add(self, event: list, reads: list[View], writes: list[tuple[int, int]]) -> None:
        """writes: (storage, bytes)."""
        self.operators.append(event)
        for view in reads:
            if view.of[0] not in self.written:
                self.read.setdefault(view.of, {})[view.place] = view.bytes_read
                self.sizes[view.of] = view.size_bytes
        for storage, count in writes:
            self.written[storage] = max(count, self.written.get(storage, 0))

    def events(self, memory: list[list]) -> list[list]:
        """The run's events: `memory` without what lived in the run alone, and the kernel between births and deaths."""
        if not self.operators:
            return memory
        born = {event[1] for event in memory if event[0] == "+"}
        passed_on = {event[1] for event in memory if event[0] == "-" and event[1] in born}
        births = [event for event in memory if event[0] == "+" and event[1] not in passed_on]
        deaths = [event for event in memory if event[0] == "-" and event[1] not in passed_on]
        return [*births, self._kernel(passed_on), *deaths]

    def _kernel(self, passed_on: set[int]) -> list:
        if len(self.operators) == 1:
            return self.operators[0]
        _, _, module, dtype, *_ = self.operators[-1]
        reads = [storage for storage, _ in self.read if storage >= 0]
        # Different views may be of the same elements.
        bytes_read = sum(min(sum(views.values()), self.sizes[of]) for of, views in self.read.items())
        writes = [storage for storage in self.written if storage not in passed_on]
        parameters = [parameter for _, parameter in self.read if parameter >= 0]
        bytes_written = sum(self.written[storage] for storage in writes)
        return ["op", KERNEL, module, dtype, 0, bytes_read, bytes_written, -1, reads, writes, parameters]
