"""Setters of FSDP2 that change the schedule: the plan that has them is made, or taken from those that were followed before.

[Note: calls of setters] A strategy says them in `setup`, before the first step, and in `program`, inside a step. What a loop calls
between two steps holds from then on, so it goes to `setup`. A loop that calls setters inside of its steps, too, does so in each of them:
then all calls of a step are its program's. What is called inside a step the first time is planned from the next step on; until then numbers
are the same, but for the order in which replicas are added.
"""

from __future__ import annotations

import warnings
import weakref

from ._applied import Applied
from ._replan import Calls

_AFTER_THE_OPTIMIZER = 1 << 30  # passes: behind all of a step
_BEFORE_THE_FIRST_STEP = {"set_gradient_divide_factor", "set_keep_unsharded_storage"}  # what a strategy takes in `setup` alone


def _same_target(a: dict, b: dict) -> bool:
    return all(a.get(key) == b.get(key) for key in ("method", "module", "recurse"))


def _with(calls: list[dict], call: dict) -> list[dict]:
    """The call in place of the one that it undoes."""
    return [*(other for other in calls if not _same_target(other, call)), call]


def _in_program(call: dict) -> dict:
    return {"call": "module", **call}


class Setters:
    """Of one applied model."""

    def __init__(self, applied: Applied) -> None:
        self._applied = weakref.ref(applied)
        self._between: list[dict] = []  # called since the last step, before the next one
        self._inside: list[tuple[int, dict]] = []  # called in the step under way
        self._watching = False

    def call(self, call: dict) -> None:
        """One call of a setter, as a strategy has it: {"method", "module", ...}."""
        applied = self._applied()
        runtime = applied.runtime
        if call["method"] == "set_post_optim_event":
            self._inside.append((_AFTER_THE_OPTIMIZER, call))
        elif runtime.between_steps or call["method"] in _BEFORE_THE_FIRST_STEP:
            self._between.append(call)
        else:
            self._inside.append((runtime.forwards + runtime.backwards, call))
            if not any(known == _in_program(call) for _, known in applied.following.calls):
                warnings.warn(f"shardplan: {call['method']} inside a step: planned from the next step on", stacklevel=4)
        self._watch()

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            self._applied().before_next_step(self._step_begins)

    def _step_begins(self, *_entered: object) -> None:
        applied = self._applied()
        self._watching = False
        between, inside = self._between, self._inside
        self._between, self._inside = [], []
        setup, calls = list(applied.following.setup), ()
        if inside:
            calls = tuple((passes, _in_program(call)) for passes, call in (*((0, call) for call in between), *inside))
        else:
            for call in between:
                setup = _with(setup, call)
        if inside:
            self._watch()  # a step without such calls is another one
        self._follow(setup, calls)

    def _follow(self, setup: list[dict], calls: Calls) -> None:
        following = self._applied().following
        if (setup, list(calls)) != (following.setup, list(following.calls)):
            following.follow_calls(setup, calls)
