# SPDX-License-Identifier: Apache-2.0
"""Planning again after a step that left its plan: from the points that the step passed to a new plan.

[Note: a trace of points] A plan's order comes from the trace's module entries and exits and from its gradients, not
from its operators, which only a simulation needs. So what the hooks saw is enough for a plan to be replayed: the new
plan has the old one's strategy and cluster, and segments that say which gradients they make but compute nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch.distributed as dist

from shardplan.tracer.communicators import digits

from .._job.arguments import PlanError
from .._model.outline import module_entries
from .documents import RequiresGrad, plan_of
from .planning import make_plan

# Calls of setters in a step: how many of its forwards and backwards came before, and the call.
Calls = tuple[tuple[int, dict], ...]
AFTER_BACKWARDS, AFTER_OPTIMIZER = 1 << 29, 1 << 30  # behind all passes of a step, however many they are
LATE = {
    "finalize_backward": AFTER_BACKWARDS, "wait_for_gradient_reduction": AFTER_BACKWARDS,
    "set_post_optim_event": AFTER_OPTIMIZER,
}


def calls_of(strategy: dict) -> tuple[list[dict], Calls]:
    """The calls of setters before the first step, and those of the step that repeats, as `replan` takes them."""
    calls: list[tuple[int, dict]] = []
    passes = 0
    for call in (strategy.get("program") or [[]])[-1]:
        if call["call"] == "module":
            calls.append((LATE.get(call["method"], passes), call))
        passes += call["call"] in ("forward", "backward")
    return strategy.get("setup", []), tuple(calls)


class _Trace:
    """Builds the trace document, and the program, from [(kind, unit, gradients, keeps)] and the calls of setters
    between them.

    [Note: modules of a unit] A point says which unit is entered, not which of its modules. The runtime notes each
    module of a unit of several: ("enter" or "leave", unit, [module], False). A plan that has run no step has no such
    notes: each of its units runs whole, in the order of its modules (`_with_modules`).
    """

    def __init__(
        self, plan, modules: list[str], requires_grad: RequiresGrad, full_precision_forwards: list[bool], calls: Calls
    ) -> None:
        self._calls = list(calls)
        self._says_sync = any(
            call["method"] in ("set_requires_gradient_sync", "set_requires_all_reduce") for _, call in calls
        )
        self._passes = 0  # forwards and backwards in the program
        self._plan, self._requires_grad, self._full_precision = plan, requires_grad, full_precision_forwards
        self._module = {fqn: number for number, fqn in enumerate(modules)}
        self._parameter: dict[tuple[int, int], int] = {}
        self._forwards: list[dict] = []
        self._backwards: list[dict] = []
        self.program: list[dict] = []  # forwards and backwards say of which forward they are
        self._microbatch: list[int] = []  # by forward: the first one of its micro-batch
        self._open: list[int] = []  # modules entered and not left
        self._backward: list[list] | None = None
        self._ready: list[int] = []  # units whose pre_backward came in this backward, once for each
        self._done: list[int] = []  # ... and whose post_backward came
        self._pending = 0  # the forward whose backward is next
        self._covered: set[int] = set()  # forwards that have had theirs
        self._occurrence: dict[tuple[int, int], int] = {}
        self._recomputed: list[int] = []  # modules that a recomputation has entered and not left
        self._keeps = False  # of the backward before
        self._unseen = False  # some backward has no end that FSDP2 sees
        self._order: list[list] = []  # forwards and backwards

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
                    if parameter.grad_dtype:
                        fields["grad_dtype"] = parameter.grad_dtype
                    if parameter.placements:
                        fields["placements"] = parameter.placements
                    if parameter.shared_with:
                        fields["shared_with"] = list(parameter.shared_with)
                    documents.append(fields)
                self._parameter[u, p] = entries[parameter.fqn]
        return documents

    def add(self, kind: str, unit: int, gradients: list[tuple[int, int]], keeps: bool) -> None:
        """One point. keeps: of the end of a backward, its gradients were not reduced. Points of the plan's own (the
        optimizer, calls of the user) are not in a trace."""
        if unit >= 0 and self._plan.units[unit].parameter_group > 0:
            # Its modules pass the same points as the first group's.
            if gradients and kind in ("pre_backward", "post_backward"):
                self._in_backward(gradients)
            return
        if kind in ("enter", "leave"):
            number = self._module[self._plan.units[unit].modules[gradients[0]]]
            self._enter(number) if kind == "enter" else self._leave(number)
        elif kind in ("pre_forward", "post_forward"):
            if len(self._plan.units[unit].modules) == 1:
                number = self._module[self._plan.units[unit].modules[0]]
                self._enter(number) if kind == "pre_forward" else self._leave(number)
        elif kind == "pre_backward":
            if self._backward is None:
                self._choose_forward(unit)
            self._in_backward(gradients)
            later = self._ready.count(unit)  # runs that came before in the backward
            self._ready.append(unit)
            for module in self._entered(unit):
                run = max(self._last_run(module) - later, 0)
                self._backward.append(["grad_ready", self._module[module], 0, run, 0])
        elif kind == "post_backward":
            self._in_backward(gradients)
            later = self._done.count(unit)  # runs whose gradients were done before in the backward
            self._done.append(unit)
            for module in self._entered(unit):
                self._inputs_done(unit, module, later)
        elif kind in ("backward_end", "backward_over"):
            self._in_backward(gradients)
            self._unseen = self._unseen or kind == "backward_over"
            self._backward.append(["backward_end"])
            self._backwards.append(
                {"name": f"b{len(self._backwards)}", "forwards": [self._pending], "events": self._backward}
            )
            if keeps != self._keeps and not self._says_sync:
                self.program.append(self._sync(not keeps))
                self._keeps = keeps
            if kind == "backward_over":
                self._microbatch[self._pending] = self._microbatch[self._around(self._pending)]
            self._append({"call": "backward", "forward": self._pending, "trace": len(self._backwards) - 1})
            self._backward = None
            self._ready, self._done = [], []
            self._covered.add(self._pending)

    def _choose_forward(self, unit: int) -> None:
        """A backward begins: of the latest forward that ran the unit, and has had none. (A loss in chunks runs the
        head's backwards before the model's own.)"""
        modules = [self._module[fqn] for fqn in self._plan.units[unit].modules]
        for forward in reversed(range(len(self._forwards))):
            if forward not in self._covered and any((forward, module) in self._occurrence for module in modules):
                self._pending = forward
                return

    def _around(self, forward: int) -> int:
        """The forward whose loss runs this one and its backward; itself: there is none."""
        return next((f for f in reversed(range(forward)) if f not in self._covered), forward)

    def calls(self) -> list[dict]:
        """The program's calls so far, as a strategy has them."""
        numbers = {first: number for number, first in enumerate(dict.fromkeys(self._microbatch))}
        made = []
        for call in self.program:
            fields = {name: value for name, value in call.items() if name != "forward"}
            if "forward" in call:
                number = numbers[self._microbatch[call["forward"]]]
                fields |= {"microbatch": number} if call["call"] == "forward" else {"microbatches": [number]}
            made.append(fields)
        return made

    def _append(self, call: dict) -> None:
        """A forward or backward, behind the calls of setters that came before it."""
        while self._calls and self._calls[0][0] <= self._passes:
            self.program.append(self._calls.pop(0)[1])
        self.program.append(call)
        self._order.append([call["call"], call.get("trace", 0)])
        self._passes += 1

    def _sync(self, reduces: bool) -> dict:
        """The call after which backwards reduce their gradients, or keep them."""
        return {"call": "module", "method": "set_requires_gradient_sync", "module": "", "value": reduces}

    def calls_left(self, until: int) -> list[dict]:
        """Calls behind the last backward, up to a place."""
        left, self._calls = (
            [call for place, call in self._calls if place <= until],
            [placed for placed in self._calls if placed[0] > until],
        )
        return left

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
        while self._recomputed:  # it has stopped early, and left without hooks
            self._backward.append(["recompute_exit", self._recomputed.pop(), True])
        for unit, parameter in gradients:
            if self._requires_grad[unit][parameter]:
                made = self._plan.units[unit].parameters[parameter].made_grad_dtype
                self._backward.append(["param_grad", self._parameter[unit, parameter], -1, *([made] if made else [])])

    def _enter(self, module: int) -> None:
        if self._backward is not None:
            self._recomputed.append(module)
            self._backward.append(["recompute_enter", module])
            return
        if not self._open:
            self._pending = len(self._forwards)
            self._microbatch.append(self._pending)
            call = {"call": "forward", "forward": self._pending, "trace": self._pending}
            if self._pending < len(self._full_precision) and self._full_precision[self._pending]:
                call["training"] = False
            self._append(call)
            self._forwards.append({"name": f"f{self._pending}", "tensors": [], "events": []})
        self._open.append(module)
        self._forwards[-1]["events"].append(["enter", module, []])
        key = (self._pending, module)
        self._occurrence[key] = self._occurrence.get(key, 0) + 1

    def _leave(self, module: int) -> None:
        if self._backward is not None:
            if module in self._recomputed:
                while self._recomputed.pop() != module:
                    pass
                self._backward.append(["recompute_exit", module])
            return
        if module not in self._open:
            return
        while True:  # an exception may have ended what is inside
            inner = self._open.pop()
            self._forwards[-1]["events"].append(["exit", inner, [self._tensor()]])
            if inner == module:
                return

    def _entered(self, unit: int) -> list[str]:
        return [fqn for fqn in self._plan.units[unit].modules if (self._pending, self._module[fqn]) in self._occurrence]

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
            **_other_meshes(self._plan),
            "modules": module_entries(names, parameters),
            "parameters": parameters,
            "forwards": self._forwards,
            "backwards": self._backwards,
            # With it a backward without any pre_backward has no end.
            **({"calls": self._order} if self._unseen else {}),
        }


def _other_meshes(plan) -> dict:
    """Dimensions of the job's other meshes that parameters lie on, as the trace has them that the plan was made of."""
    own = {dim.name for dim in plan.mesh}
    lie_on = {
        placement["mesh_dim"] for unit in plan.units for parameter in unit.parameters
        for placement in parameter.placements
    }
    found = {c.name: digits(tuple(sorted(c.group_of(0))), plan.world_size) for c in plan.communicators}
    entries = [
        {"name": name, "size": found[name][0][0], "stride": found[name][0][1]}
        for name in sorted(lie_on - own) if len(found.get(name) or ()) == 1
    ]
    return {"world_size": plan.world_size, "communicators": entries} if entries else {}


def _with_modules(plan, log: list[tuple]) -> list[tuple]:
    """The log with the modules of units of several. See [Note: modules of a unit]."""
    if any(entry[0] in ("enter", "leave") for entry in log):
        return log
    found: list[tuple] = []
    ran: dict[int, int] = {}  # by unit under way: how many of its modules have run
    for entry in log:
        kind, unit = entry[:2]
        modules = len(plan.units[unit].modules) if unit >= 0 else 1
        if modules == 1:
            found.append(entry)
            continue
        if kind == "post_forward":
            last = ran.pop(unit, 1)
            found.append(("leave", unit, [last - 1], False))
            for number in range(last, modules):  # a plan of 2.11 has one point for all of them
                found += [(way, unit, [number], False) for way in ("enter", "leave")]
        found.append(entry)
        if kind == "pre_forward":
            number = ran.get(unit, 0)
            found += [("leave", unit, [number - 1], False)] if number else []
            found.append(("enter", unit, [number], False))
            ran[unit] = number + 1
    return found


def replan(
    plan,
    log: list[tuple],
    names: dict[str, str],
    requires_grad: RequiresGrad,
    full_precision_forwards: list[bool],
    setup: Sequence[dict],
    calls: Calls,
):
    """The plan for steps like the one in `log`. PlanError: there is none. names: FQN -> class name of every module, in
    tree order.
    requires_grad: which parameters do, whatever `plan` says. full_precision_forwards: which forwards were evaluations
    in full precision.
    setup, calls: the strategy's, before the first step and in each. Every rank makes the plan; they all saw the
    same."""
    trace = _Trace(plan, list(names), requires_grad, full_precision_forwards, calls)
    trace.parameters()
    try:
        for kind, unit, gradients, keeps in _with_modules(plan, log):
            trace.add(kind, unit, gradients, keeps)
    except (IndexError, KeyError):
        raise PlanError("its points are no forwards with a backward each") from None
    if trace.program and trace.ends_without_sync:
        raise PlanError("its last backward leaves gradients that nothing reduces")
    strategy = {**json.loads(plan.strategy_json), "setup": list(setup)}
    strategy["program"] = [
        [
            *trace.calls(),
            *trace.calls_left(AFTER_BACKWARDS),
            {"call": "optimizer_step"},
            *trace.calls_left(AFTER_OPTIMIZER),
            {"call": "zero_grad"},
        ]
    ]
    try:
        return plan_of(make_plan("plan", trace.document(names, plan.model), strategy, cluster=plan.cluster_json))
    except PlanError as error:
        raise PlanError(f"planning again on rank {dist.get_rank()} failed: {error}") from None
