"""Planning again after a step that left its plan: from the points that the step passed to a new plan.

[Note: a trace of points] A plan's order comes from the trace's module entries and exits and from its gradients, not from its
operators, which only a simulation needs. So what the hooks saw is enough for a plan to be replayed: the new plan has the
old one's strategy and cluster, and segments that say which gradients they make but compute nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch.distributed as dist

from ._errors import PlanError
from ._outline import module_entries
from ._planning import make_plan, plan_of

RequiresGrad = tuple[tuple[bool, ...], ...]  # by unit and parameter
Calls = tuple[tuple[int, dict], ...]  # of setters in a step: how many of its forwards and backwards came before, and the call


class _Trace:
    """Builds the trace document, and the program, from [(kind, unit, gradients, keeps)] and the calls of setters between them."""

    def __init__(
        self, plan, modules: list[str], requires_grad: RequiresGrad, full_precision_forwards: list[bool], calls: Calls
    ) -> None:
        self._calls = list(calls)
        self._passes = 0  # forwards and backwards in the program
        self._plan, self._requires_grad, self._full_precision = plan, requires_grad, full_precision_forwards
        self._module = {fqn: number for number, fqn in enumerate(modules)}
        self._parameter: dict[tuple[int, int], int] = {}
        self._forwards: list[dict] = []
        self._backwards: list[dict] = []
        self.program: list[dict] = []
        self._open: list[int] = []  # units entered and not left
        self._backward: list[list] | None = None
        self._ready: list[int] = []  # units whose pre_backward came in this backward, once for each
        self._done: list[int] = []  # ... and whose post_backward came
        self._pending = 0  # the forward whose backward is next
        self._occurrence: dict[tuple[int, int], int] = {}
        self._keeps = False  # of the backward before

    def parameters(self) -> list[dict]:
        """One entry for each parameter: of the first unit that has it."""
        entries: dict[str, int] = {}
        documents = []
        for u, unit in enumerate(self._plan.units):
            for p, parameter in enumerate(unit.parameters):
                if parameter.fqn not in entries:
                    entries[parameter.fqn] = len(documents)
                    fields = {"fqn": parameter.fqn, "shape": list(parameter.shape), "dtype": parameter.dtype}
                    if not self._requires_grad[u][p]:
                        fields["requires_grad"] = False
                    if parameter.shared_with:
                        fields["shared_with"] = list(parameter.shared_with)
                    documents.append(fields)
                self._parameter[u, p] = entries[parameter.fqn]
        return documents

    def add(self, kind: str, unit: int, gradients: list[tuple[int, int]], keeps: bool) -> None:
        """One point. keeps: of the end of a backward, its gradients were not reduced. What the plan does by itself (the optimizer, calls of the user) is not in a trace."""
        if unit >= 0 and self._plan.units[unit].parameter_group > 0:
            return  # its modules pass the same points as the first group's
        if kind == "pre_forward":
            self._enter(unit)
        elif kind == "post_forward":
            self._leave(unit)
        elif kind == "pre_backward":
            self._in_backward(gradients)
            later = self._ready.count(unit)  # runs that came before in the backward
            self._ready.append(unit)
            for module in self._plan.units[unit].modules:
                run = max(self._last_run(module) - later, 0)
                self._backward.append(["grad_ready", self._module[module], 0, run, 0])
        elif kind == "post_backward":
            self._in_backward(gradients)
            later = self._done.count(unit)  # runs whose gradients were done before in the backward
            self._done.append(unit)
            for module in self._plan.units[unit].modules:
                self._inputs_done(unit, module, later)
        elif kind == "backward_end":
            self._in_backward(gradients)
            self._backward.append(["backward_end"])
            self._backwards.append({"name": f"b{len(self._backwards)}", "forwards": [self._pending], "events": self._backward})
            if keeps != self._keeps:
                self.program.append(self._sync(not keeps))
                self._keeps = keeps
            self._append({"call": "backward", "microbatches": [self._pending], "trace": len(self._backwards) - 1})
            self._backward = None
            self._ready, self._done = [], []

    def _append(self, call: dict) -> None:
        """A forward or backward, behind the calls of setters that came before it."""
        while self._calls and self._calls[0][0] <= self._passes:
            self.program.append(self._calls.pop(0)[1])
        self.program.append(call)
        self._passes += 1

    def _sync(self, reduces: bool) -> dict:
        """The call after which backwards reduce their gradients, or keep them."""
        return {"call": "module", "method": "set_requires_gradient_sync", "module": "", "value": reduces}

    @property
    def calls_left(self) -> list[dict]:
        """Of setters, behind the last backward."""
        return [call for _, call in self._calls]

    @property
    def ends_without_sync(self) -> bool:
        return self._keeps

    def _inputs_done(self, unit: int, module: str, later: int) -> None:
        run, number = max(self._last_run(module) - later, 0), self._module[module]
        self._backward.append(["inputs_done", number, run, 0])
        frozen = not any(self._requires_grad[unit])
        enters = [event for event in self._forwards[self._pending]["events"] if event[:2] == ["enter", number]]
        if frozen and run < len(enters) and not enters[run][2]:
            enters[run][2].append(self._tensor())  # a frozen unit's point is where its inputs' gradients are done

    def _tensor(self) -> int:
        """A new one of the forward."""
        tensors = self._forwards[self._pending]["tensors"]
        tensors.append({"shape": [1], "dtype": "float32", "requires_grad": True})
        return len(tensors) - 1

    def _last_run(self, module: str) -> int:
        return self._occurrence.get((self._pending, self._module[module]), 1) - 1

    def _in_backward(self, gradients: list[tuple[int, int]]) -> None:
        if self._backward is None:
            self._backward = []
        for unit, parameter in gradients:
            if self._requires_grad[unit][parameter]:
                self._backward.append(["param_grad", self._parameter[unit, parameter], -1])

    def _enter(self, unit: int) -> None:
        if self._backward is not None:
            return  # a recomputation
        if not self._open:
            self._pending = len(self._forwards)
            call = {"call": "forward", "microbatch": self._pending, "trace": self._pending}
            if self._pending < len(self._full_precision) and self._full_precision[self._pending]:
                call["training"] = False
            self._append(call)
            self._forwards.append({"name": f"f{self._pending}", "tensors": [], "events": []})
        self._open.append(unit)
        for module in self._plan.units[unit].modules:
            key = (self._pending, self._module[module])
            self._occurrence[key] = self._occurrence.get(key, 0) + 1
            self._forwards[-1]["events"].append(["enter", self._module[module], []])

    def _leave(self, unit: int) -> None:
        if self._backward is not None or unit not in self._open:
            return
        for module in reversed(self._plan.units[unit].modules):
            self._forwards[-1]["events"].append(["exit", self._module[module], [self._tensor()]])
        self._open.remove(unit)

    def document(self, names: dict[str, str], model: str) -> dict:
        parameters = self.parameters()
        covered = {forward for backward in self._backwards for forward in backward["forwards"]}
        for number, forward in enumerate(self._forwards):
            if number not in covered:  # it had no gradients
                forward["grad_enabled"] = False
                for tensor in forward["tensors"]:
                    tensor["requires_grad"] = False
        return {
            "schema": "shardplan.trace/1",
            "model": model,
            "source": "the points that a step passed",
            "compute_dtype": self._plan.units[0].param_dtype,
            "modules": module_entries(names, parameters),
            "parameters": parameters,
            "forwards": self._forwards,
            "backwards": self._backwards,
        }


def requires_grad_of(plan) -> RequiresGrad:
    return tuple(tuple(parameter.requires_grad for parameter in unit.parameters) for unit in plan.units)


def replan(
    plan,
    log: list[tuple],
    names: dict[str, str],
    requires_grad: RequiresGrad,
    full_precision_forwards: list[bool],
    setup: Sequence[dict],
    calls: Calls,
):
    """The plan for steps like the one in `log`. PlanError: there is none. names: FQN -> class name of every module, in tree order.
    requires_grad: which parameters do, whatever `plan` says. full_precision_forwards: which forwards were evaluations in full precision.
    setup, calls: the strategy's, before the first step and in each. Every rank makes the plan; they all saw the same."""
    trace = _Trace(plan, list(names), requires_grad, full_precision_forwards, calls)
    trace.parameters()
    try:
        for kind, unit, gradients, keeps in log:
            trace.add(kind, unit, gradients, keeps)
    except (IndexError, KeyError):
        raise PlanError("its points are no forwards with a backward each") from None
    if trace.program and trace.ends_without_sync:
        raise PlanError("its last backward leaves gradients that nothing reduces")
    strategy = {**json.loads(plan.strategy_json), "setup": list(setup)}
    strategy["program"] = [[*trace.program, {"call": "optimizer_step"}, *trace.calls_left, {"call": "zero_grad"}]]
    try:
        return plan_of(make_plan("plan", trace.document(names, plan.model), strategy, cluster=plan.cluster_json))
    except PlanError as error:
        raise PlanError(f"planning again on rank {dist.get_rank()} failed: {error}") from None
