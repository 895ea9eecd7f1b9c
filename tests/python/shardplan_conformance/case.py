# SPDX-License-Identifier: Apache-2.0
"""A case: a model, how it is sharded, what it is trained on; and what of that the tracer and the planner get."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command says itself when torch is missing
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

DEFAULT_PROGRAM = [[{"call": call} for call in ("forward", "backward", "optimizer_step", "zero_grad")]]
STEPS_IN_BACKWARD = [[{"call": "forward"}, {"call": "backward"}]]
SCHEMA = "shardplan.strategy/1"


class CaseError(Exception):
    """A case that cannot be run as it says: what, where, what to do."""


@dataclass
class Forward:
    """The inputs of one forward: positional, or by name. `grad` false: it runs under `torch.no_grad()`. `module`: the
    FQN of the module that is called in place of the model (a head, on a part of what the model returned). `raises_in`:
    the FQN of a module whose forward raises where it is entered; `raises_in_backward`: of one where the backward raises
    when the gradient of its input is ready. `reset_iter_state` follows in the program."""

    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    grad: bool = True
    module: str = ""
    raises_in: str = ""
    raises_in_backward: str = ""


@dataclass
class Case:
    """A case to record.

    model: makes the model, on the CPU; called on every rank, with the same random seed.
    forwards: the inputs, on every rank of the same shapes. `{"call": "forward", "trace": i}` of the program runs
    `forwards[i]`.
    strategy: a strategy document (docs/reference/strategy-format.md) as a dict; `schema` may be left out. Its program's
    backwards name micro-batches
        only, their `trace` is found.
    ranks: how many; the product of the strategy's mesh, if it has one.
    steps: how many to record and compare; None: three, or the program's if that is longer.
    parallelize: what is done to the model before it is sharded, on the strategy's mesh: tensor or expert parallelism.
    apply: a Python file as `shardplan export --fsdp2` writes it: it shards the model in place of the strategy's calls,
    and its functions stand for the program's calls on modules.
    loss: of the model's output; None: the sum of every floating output that needs a gradient (a scalar output, or an
    output's `loss`, as it is).
    """

    model: Callable[[], nn.Module]
    forwards: list[Forward]
    strategy: dict
    ranks: int = 2
    steps: int | None = None
    loss: Callable | None = None
    apply: str | os.PathLike = ""
    parallelize: Callable[[nn.Module, DeviceMesh], None] | None = None
    name: str = "case"

    def program(self) -> list[list[dict]]:
        in_backward = self.strategy.get("optimizer", {}).get("in_backward")
        return self.strategy.get("program") or (STEPS_IN_BACKWARD if in_backward else DEFAULT_PROGRAM)

    def step_count(self) -> int:
        return self.steps if self.steps is not None else max(3, len(self.program()))

    def step(self, index: int) -> list[dict]:
        """The program's last step repeats."""
        program = self.program()
        return program[min(index, len(program) - 1)]


@dataclass
class TracedProgram:
    """`groups`: for each pass of the trace, the forwards (indices into Case.forwards) in the order of their calls and
    whether a backward follows. `program`: the case's, with `trace` naming passes of the trace. `forward_of`: its
    forwards' indices into Case.forwards, by (step, call).
    """

    groups: list[tuple[tuple[int, ...], bool]]
    program: list[list[dict]]
    forward_of: dict[tuple[int, int], int]


class _Linker:
    """Finds the backward that each forward is followed by: forwards are traced together with it."""

    def __init__(self, case: Case):
        self.count = len(case.forwards)
        self.grad = [forward.grad for forward in case.forwards]
        self.raises = [forward.raises_in for forward in case.forwards]
        self.program = copy.deepcopy(case.program())
        self.groups: list[tuple[tuple[int, ...], bool]] = []
        self.forward_of: dict[tuple[int, int], int] = {}
        self._order: list[tuple[int, int]] = []  # (step, call) of every forward
        self._group_of: dict[tuple[int, int], tuple[int, int]] = {}  # forward -> (group, position in it)

    def run(self) -> TracedProgram:
        backwards: list[tuple[dict, int]] = []
        open_forwards: dict[int, tuple[int, int]] = {}  # micro-batch -> its last forward
        for s, step in enumerate(self.program):
            for c, call in enumerate(step):
                if call["call"] == "forward":
                    self._forward(s, c, call)
                    if not self.raises[self.forward_of[(s, c)]]:
                        open_forwards[call.get("microbatch", 0)] = (s, c)
                elif call["call"] == "backward":
                    backwards.append((call, self._backward(s, c, call, open_forwards)))
        for where in self._order:
            if where not in self._group_of:
                self._group_of[where] = (self._group((self.forward_of[where],), False), 0)
        first_pass, passes = [], 0
        for forwards, _ in self.groups:
            first_pass.append(passes)
            passes += len(forwards)
        for s, c in self._order:
            group, position = self._group_of[(s, c)]
            self.program[s][c]["trace"] = first_pass[group] + position
        with_backward = [g for g, (_, backward) in enumerate(self.groups) if backward]
        for call, group in backwards:
            call["trace"] = with_backward.index(group)
        return TracedProgram(self.groups, self.program, self.forward_of)

    def _forward(self, s: int, c: int, call: dict) -> None:
        index = call.get("trace", 0)
        if not 0 <= index < self.count:
            raise CaseError(f"/program/{s}/{c}/trace: the case has no forward {index}; it has {self.count}")
        self.forward_of[(s, c)] = index
        self._order.append((s, c))

    def _backward(self, s: int, c: int, call: dict, open_forwards: dict) -> int:
        microbatches = call.setdefault("microbatches", [0])
        missing = [m for m in microbatches if m not in open_forwards]
        if missing:
            raise CaseError(f"/program/{s}/{c}: no forward of micro-batch {missing[0]} is waiting for a backward")
        microbatches.sort(key=lambda m: self._order.index(open_forwards[m]))
        covered = [open_forwards.pop(m) for m in microbatches]
        for where in covered:
            if not self.grad[self.forward_of[where]]:
                raise CaseError(f"/program/{s}/{c}: a backward of a forward without gradients")
        group = self._group(tuple(self.forward_of[where] for where in covered), True)
        for position, where in enumerate(covered):
            self._group_of[where] = (group, position)
        return group

    def _group(self, forwards: tuple[int, ...], backward: bool) -> int:
        if (forwards, backward) not in self.groups:
            self.groups.append((forwards, backward))
        return self.groups.index((forwards, backward))


def traced_program(case: Case) -> TracedProgram:
    return _Linker(case).run()


def planner_strategy(case: Case) -> dict:
    """The case's strategy document as the planner gets it."""
    return {"schema": SCHEMA, **case.strategy, "program": traced_program(case).program}


def load_cases(source: str) -> list[Case]:
    """The case or cases that `MODULE:FUNCTION` returns. Raises CaseError."""
    module_name, _, function_name = source.partition(":")
    if not module_name or not function_name:
        raise CaseError(f'"{source}" is not MODULE:FUNCTION')
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        made = function()
    except Exception as error:
        raise CaseError(f'"{source}" failed: {type(error).__name__}: {error}') from error
    cases = made if isinstance(made, (list, tuple)) else [made]
    for case in cases:
        if not isinstance(case, Case):
            raise CaseError(
                f'"{source}" returned a {type(case).__name__}; expected a shardplan_conformance.Case or a list'
            )
        if (
            not case.name
            or case.name.startswith(".")
            or "/" in case.name
            or not case.name.isprintable()
            or len(os.fsencode(case.name)) > 200
        ):
            raise CaseError(f"a case's name is a part of names of files, which {case.name!r} cannot be")
    return list(cases)
