# SPDX-License-Identifier: Apache-2.0
"""Setters of FSDP2 that change the schedule: the plan that has them is made, or taken from those that were followed
before.

[Note: calls of setters] A strategy has calls in two places: in `setup`, before the first step, and in `program`, inside
of each. A call between two steps holds from then on, so it goes to `setup`. A loop that calls the same method inside of
its steps, too, does so in each of them: then the call is its program's. So are the calls that do something instead of
setting it (unshard, reshard, finalize_backward).

The next step is expected to call what the last one called: its plan is chosen when it begins. A step that calls
otherwise than its plan has it is right all the same. Units are gathered and freed at other points, and numbers are the
same, but for the order in which replicas are added.
"""

from __future__ import annotations

import weakref

from .._job.arguments import PlanError
from .._model.fit import modules_of
from .._plans.replan import AFTER_BACKWARDS, LATE, Calls
from .._replay.applied import Applied

# Setters that are never called inside of a step.
_IN_SETUP = {"set_gradient_divide_factor", "set_keep_unsharded_storage", "set_manual_backward_finalization"}
_OF_A_STEP = {"unshard", "reshard"}
_SYNC = ("set_requires_gradient_sync", "set_requires_all_reduce")


def _same_target(a: dict, b: dict) -> bool:
    return all(a.get(key) == b.get(key) for key in ("method", "module", "recurse"))


def _with(calls: list[dict], call: dict) -> list[dict]:
    """The call in place of the one that it undoes."""
    return [*(other for other in calls if not _same_target(other, call)), call]


def units_of(applied: Applied, module, recurse: bool) -> list[int]:
    """The units that have the module, or one below it, among theirs."""
    modules = modules_of(applied.model)
    wanted = {id(m) for m in (module.modules() if recurse else [module])}
    return [i for i, unit in enumerate(applied.plan.units) if any(id(modules[fqn]) in wanted for fqn in unit.modules)]


def setters_of(applied: Applied) -> Setters | None:
    """The setters of a plan of fsdp2; FSDP1 has none."""
    return None if applied.plan.policy == "fsdp1" else Setters(applied)


class Setters:
    """The setters of one applied model."""

    def __init__(self, applied: Applied) -> None:
        self._from_disk = False  # the plan has the calls of another run, which this one makes again, or does not
        self._applied = weakref.ref(applied)
        self._between: list[dict] = []  # called since the last step, before the next one
        self._first: list[dict] = []  # ... before the step under way
        self._setup: list[dict] = list(applied.following.setup)  # what held before them
        self._inside: list[tuple[int, dict]] = []  # called in the step under way
        # Units whose gradients are kept, in place of reduced within replicas.
        self._without_all_reduce: set[int] = set()
        self._refused: PlanError | None = None  # no plan for what was called before the step under way

    def came_from_disk(self) -> None:
        """Before the first step: its plan has the calls of another run."""
        self._from_disk, self._setup = True, []
        self.watch()

    # ---- from the modules ----

    def call(self, method: str, module: str, recurse: bool = True, **fields: object) -> None:
        """One call of a setter, as a strategy has it."""
        applied = self._applied()
        call = {"method": method, "module": module, **fields, **({} if recurse else {"recurse": False})}
        if method in LATE:
            self._inside.append((LATE[method], call))
        elif applied.runtime.between_steps or method in _IN_SETUP:
            self._between.append(call)
        else:
            self._inside.append((applied.runtime.forwards + applied.runtime.backwards, call))
        self.watch()

    def set_requires_gradient_sync(self, module, value: bool, recurse: bool) -> None:
        """Done at once, plan or not; noted where it changes anything."""
        applied = self._applied()
        units = units_of(applied, module, recurse)
        changes = any(self._reduces(unit) != value for unit in units)
        applied.user_sync.update(dict.fromkeys(units, value))
        self._apply_sync(units)
        if changes:
            self.call("set_requires_gradient_sync", applied.fqn_of(module), recurse, value=value)

    def set_requires_all_reduce(self, module, value: bool, recurse: bool) -> None:
        """Until a plan has the call, gradients that are not to be added across replicas are kept whole instead."""
        applied = self._applied()
        self.call("set_requires_all_reduce", applied.fqn_of(module), recurse, value=value)
        if self.has("set_requires_all_reduce"):
            return
        units = [
            unit for unit in units_of(applied, module, recurse) if applied.plan.units[unit].replicate_communicator >= 0
        ]
        self._without_all_reduce = (
            self._without_all_reduce - set(units) if value else self._without_all_reduce | set(units)
        )
        self._apply_sync(units)

    def optimizer_steps(self) -> None:
        """RuntimeError where replicas were never to be added, and no plan does that."""
        if self._without_all_reduce:
            raise RuntimeError(
                "shardplan: optimizer.step() while set_requires_all_reduce(False) holds, and no plan has that: "
                f"{self._refused}"
            )

    # ---- where steps begin and end ----

    def step_left_its_plan(self) -> None:
        """The step under way is over, and is planned as it went: with these calls."""
        following = self._applied().following
        self._refused = None
        following.setup, following.calls = self._combined(self._setup, self._first, self._inside)

    def watch(self) -> None:
        """The next step's begin looks at what was called."""
        applied = self._applied()
        if self._step_begins not in applied.at_next_step:
            applied.before_next_step(self._step_begins)

    def _step_begins(self, *_entered: object) -> None:
        following = self._applied().following
        if self._refused is None and not self._from_disk:  # else they are what was refused, or called since the start
            self._setup, self._first = following.setup, []
        self._refused = None
        for call in self._between:
            self._first = _with(self._first, call)
        inside, self._inside, self._between = self._inside, [], []
        from_disk, self._from_disk = self._from_disk, False
        if from_disk:
            inside = [
                (passes, {k: v for k, v in call.items() if k != "call"})
                for passes, call in following.calls
                if passes > 0
            ]
            if self._combined(self._setup, self._first, inside) != (following.setup, following.calls):
                inside = []  # another loop
        if inside:
            self.watch()  # a step without such calls is another one
        setup, calls = self._combined(self._setup, self._first, inside)
        if (setup, list(calls)) == (following.setup, list(following.calls)):
            return
        try:
            following.follow_calls(setup, calls)
        except PlanError as error:
            if all(call["method"] not in _SYNC for call in self._first):
                raise
            self._refused = error  # with what the step calls inside it may be planned
            own = [call for call in setup if call["method"] not in _SYNC]
            if from_disk and (own, ()) != (following.setup, following.calls):
                following.follow_calls(own, ())  # what another run has set does not hold
            self.watch()
            return
        units, self._without_all_reduce = list(self._without_all_reduce), set()
        self._apply_sync(units)

    def _combined(
        self, setup: list[dict], first: list[dict], inside: list[tuple[int, dict]]
    ) -> tuple[list[dict], Calls]:
        for call in first:
            if call["method"] in _IN_SETUP:
                setup = _with(setup, call)
        first = [call for call in first if call["method"] not in _IN_SETUP]
        again = {call["method"] for _, call in inside} | _OF_A_STEP
        calls = list(inside)
        for call in reversed(first):
            if call["method"] in again:
                calls.insert(0, (0, call))
        for call in first:
            if call["method"] not in again:
                setup = _with(setup, call)
        finalizes = any(call["method"] == "set_manual_backward_finalization" and call["value"] for call in setup)
        if finalizes and not any(call["method"] == "finalize_backward" for _, call in calls):
            calls.append((AFTER_BACKWARDS, {"method": "finalize_backward", "module": ""}))
        calls.sort(key=lambda placed: placed[0])  # stable: in the order of the calls
        return setup, tuple((passes, {"call": "module", **call}) for passes, call in calls)

    def has(self, method: str) -> bool:
        """Does the plan's step have such a call?"""
        return any(call["method"] == method for _, call in self._applied().following.calls)

    def _reduces(self, unit: int) -> bool:
        return self._applied().user_sync.get(unit, True)

    def _apply_sync(self, units: list[int]) -> None:
        for value in (False, True):
            wanted = [unit for unit in units if (self._reduces(unit) and unit not in self._without_all_reduce) == value]
            if wanted:
                self._applied().set_sync(wanted, value)
