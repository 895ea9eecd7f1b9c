# SPDX-License-Identifier: Apache-2.0
"""Plans that a model has followed, and which one it follows next: steps that deviate, parameters that are frozen or
unfrozen."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import warnings
import weakref
from collections.abc import Callable

import torch.nn as nn

from .._job.arguments import PlanError
from .._job.first_rank import FirstRankSays
from .._job.mesh import process_groups
from .._job.native import native
from .._job.peers import connect
from .._model.forwards import signature_of
from .._model.outline import class_names
from .._parameters.flat import FlatUnit
from .._plans.documents import RequiresGrad, plan_of, requires_grad_of, units_of
from .._plans.replan import Calls, calls_of, replan
from .applied import Applied
from .runtime import make_runtime, supply_shards
from .ways import NextPath, Way, apart, in_words, points

Key = tuple[RequiresGrad, bytes, str]  # (requires_grad, a hash of the plan's text, calls of setters)

_MOST = 8  # each has process groups' communicators and buffers of its own
_RARE_WAYS = 4096  # that are remembered
_TRIES_APART = 3  # steps in a row of which plans are made to see whether they fit those of other ranks


@dataclasses.dataclass
class Path:
    """A plan, and what replays it."""

    plan: native.Plan
    groups: list
    runtime: native.Runtime
    # The points of a step that goes so, and which of its forwards have full precision; empty: the plan knows.
    log: list[tuple] = dataclasses.field(default_factory=list)
    full_precision: list[bool] = dataclasses.field(default_factory=list)


class KeptPlans:
    """The plans of one applied model, which holds this."""

    def __init__(self, applied: Applied) -> None:
        self._applied = weakref.ref(applied)
        self.kept: collections.OrderedDict[Key, Path] = collections.OrderedDict()  # latest last
        self._key_of: dict[Way, Key] = {}
        self._next = NextPath()
        self._went = True  # the last step is counted, or has no plan
        self._rare: set[Way] = set()
        self.unplannable: set[Way] = set()
        self.unplannable_because = ""  # the last of them
        self.setup, self.calls = calls_of(json.loads(applied.plan.strategy_json))
        self._first_calls = self._calls_key()
        self.replans = False  # after a deviation
        self._tries_apart = 0  # steps in a row that ranks went different ways, without plans that fit each other
        self._told_apart = False  # the user knows of them
        self._names: dict[Key, str] = {}
        self._foreseen: FirstRankSays | None = None  # once there are several plans
        self.on_new_plan: Callable[[], None] | None = None
        # Makes the text of a plan of the module tree, with this set-up: a plan from disk that has run no step need not
        # say which of its units' modules run. None: by nobody.
        self.plan_anew: Callable[[list[dict]], str] | None = None

    @property
    def applied(self) -> Applied:
        return self._applied()

    def fall_back_on_deviation(self) -> None:
        """The present runtime finishes a step that deviates on demand, and says so when it has ended."""
        self.replans = True
        kept = weakref.ref(self)  # the runtime is the model's, through its hooks

        def on_step_end() -> None:
            if kept() is not None:
                kept().follow(kept().applied.runtime.log)

        def on_requires_grad_change(unit: int, change: str):
            return kept().follow_requires_grad(unit, change)

        self.applied.runtime.fall_back_on_deviation(on_step_end)
        if not self.applied.flat_units():
            self.applied.runtime.on_requires_grad_change(on_requires_grad_change)

    def follow(self, log: list[tuple]) -> None:
        """The step that deviated is over: the next one follows a plan made of the points that it passed, one that is
        kept if there was such a step before."""
        applied = self.applied
        deviation, full_precision = applied.runtime.deviation, applied.runtime.full_precision_forwards
        self.applied.leave()
        self._went = True
        if applied.setters is not None:
            applied.setters.step_left_its_plan()
        way = self._way(requires_grad_of(applied.plan), log, full_precision, self._calls_key())
        if not self._alike(repr(way)):
            return self._followapart(way, log, deviation, full_precision)
        self._tries_apart = 0
        if (key := self._key_of.get(way)) in self.kept:
            return self._goes(key)
        if way in self.unplannable or self._is_rare(way):
            return
        try:
            plan = self._plan_again(log, requires_grad_of(applied.plan), full_precision)
        except PlanError as error:
            self.unplannable.add(way)
            self.unplannable_because = str(error)
            warnings.warn(
                f"shardplan: {deviation}; such a step cannot be planned ({error}): it is always done on demand",
                stacklevel=2,
            )
            return
        self._take_up(way, plan, deviation, log, full_precision)

    def _take_up(
        self, way: Way, plan: native.Plan, deviation: str, log: list[tuple], full_precision: list[bool]
    ) -> None:
        """The plan for a step that deviated, which went this way."""
        key = self._key_of[way] = self._key(requires_grad_of(plan), plan, self._calls_key())
        if key in self.kept:
            return self._goes(key)  # points that differ in what no plan looks at
        if self.on_new_plan is None:
            warnings.warn(f"shardplan: {deviation}; the next step is planned again", stacklevel=3)
        self._start_plan(key, plan, log, full_precision)
        self._goes(key)
        if self.on_new_plan is not None:
            self.on_new_plan()

    def _alike(self, text: str) -> bool:
        """Is it the same on all ranks? Collective."""
        return self.applied.runtime.alike(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))

    def _followapart(self, way: Way, log: list[tuple], deviation: str, full_precision: list[bool]) -> None:
        """The step passed other points on each rank. Each has a plan of its own, if these communicate the same (with
        set_reduce_scatter_unused_params they do); else there is none. Every rank comes to the same end."""
        applied = self.applied
        self._tries_apart += 1
        if self._tries_apart > _TRIES_APART:
            return
        try:
            known = self.kept.get(self._key_of.get(way))
            plan = known.plan if known else self._plan_again(log, requires_grad_of(applied.plan), full_precision)
        except PlanError:
            plan = None
        if not self._alike("" if plan is None else plan.digest_of_collectives) or plan is None:
            return self._tellapart(log)
        self._tries_apart = 0
        self._take_up(way, plan, deviation, log, full_precision)

    def _tellapart(self, log: list[tuple]) -> None:
        """Says once which ranks went where. Collective."""
        if self._told_apart:
            return
        self._told_apart = True
        applied = self.applied
        ways = applied.runtime.tell(json.dumps(in_words(applied.plan, points(log))))
        said = apart(ways, applied.mesh.mesh.flatten().tolist())
        warnings.warn(f"shardplan: {said}; such steps have no plan, and are always done on demand", stacklevel=4)

    def _way(self, requires_grad: RequiresGrad, log: list[tuple], full_precision: list[bool], calls: str) -> Way:
        return requires_grad, points(log), tuple(full_precision) if any(full_precision) else (), calls

    def _is_rare(self, way: Way) -> bool:
        """Steps that go each their own way are not worth plans: where many are kept, a new one is made for a way that
        is seen again."""
        if len(self.kept) < _MOST or way in self._rare:
            return False
        if len(self._rare) >= _RARE_WAYS:
            self._rare.clear()
        self._rare.add(way)
        return True

    def _goes(self, key: Key) -> None:
        """The step that deviated went this way."""
        self._next.went(key)
        if self.kept[key].runtime is not self.applied.runtime:
            self._take(key)

    def foresee(self) -> None:
        """From now on each step follows the plan that it is likely to follow, not the one of the step before."""
        applied = self.applied
        if self._step_begins not in applied.at_next_step:
            applied.before_next_step(self._step_begins)

    def _step_begins(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.applied.following is not self:
            return  # the model was given a plan of another strategy
        present = self._present()
        if not self._went:
            self._next.went(present)
        self._went = False
        self._next.begins((id(module), signature_of(args, kwargs)))
        expected = self._foresee_together(self._next.expected())
        if expected in self.kept and expected != present and (expected[0], expected[2]) == (present[0], present[2]):
            self._go_to(expected, None)
        self.foresee()

    def _foresee_together(self, expected: Key | None) -> Key | None:
        """The first rank's expectation: others were given other arguments, perhaps."""
        if len(self.kept) < 2:
            return expected
        if self._foreseen is None:
            self._foreseen = FirstRankSays(self.applied.mesh.mesh.flatten().tolist(), self.applied.timeout_s)
        said = self._foreseen.of_step(self._name(expected))
        if said == self._name(expected):
            return expected
        return next((key for key in reversed(self.kept) if self._name(key) == said), None)

    def _name(self, key: Key | None) -> str:
        """The name of a kept plan, equal on all ranks."""
        if key not in self.kept:
            return ""
        if key not in self._names:
            of = (key[0], self.kept[key].plan.digest_of_collectives, key[2])
            self._names[key] = hashlib.sha256(repr(of).encode()).hexdigest()
        return self._names[key]

    def _present(self) -> Key:
        return next(key for key, path in self.kept.items() if path.runtime is self.applied.runtime)

    def follow_calls(self, setup: list[dict], calls: Calls) -> None:
        """A step begins after setters were called, or with other calls of them than the step before: it follows the
        plan that has them. PlanError: there is none, and nothing has changed."""
        before = self.setup, self.calls
        self.setup, self.calls = setup, calls
        try:
            key, plan = self._for_samepoints(requires_grad_of(self.applied.plan))
        except PlanError:
            self.setup, self.calls = before
            raise
        self._go_to(key, plan)

    def _for_samepoints(self, requires_grad: RequiresGrad) -> tuple[tuple, native.Plan | None]:
        """With these parameters and the present calls: the key of the plan that was followed last, or of a new one for
        the present plan's points, and that."""
        known = [key for key in self.kept if key[0] == requires_grad and key[2] == self._calls_key()]
        if known:
            return known[-1], None
        log, full_precision = self._present_log()
        try:
            plan = self._plan_again(log, requires_grad, full_precision)
        except PlanError:
            if self.plan_anew is None or self.calls or requires_grad != requires_grad_of(self.applied.plan):
                raise
            plan = plan_of(self.plan_anew(self.setup))
            if units_of(plan) != units_of(self.applied.plan):
                raise
        return self._key(requires_grad, plan, self._calls_key()), plan

    def _present_log(self) -> tuple[list[tuple], list[bool]]:
        runtime = self.applied.runtime
        path = next((path for path in self.kept.values() if path.runtime is runtime), None)
        if path is not None and path.log:
            return path.log, path.full_precision
        return runtime.planned_log, runtime.full_precision_forwards

    def _key(self, requires_grad: RequiresGrad, plan: native.Plan, calls: str) -> Key:
        return requires_grad, hashlib.sha256(plan.json.encode()).digest(), calls

    def _go_to(self, key: Key, plan: native.Plan | None) -> None:
        """plan: a new one; None: the one that is kept."""
        self.applied.leave()
        if plan is None:
            self._take(key)
        else:
            self._start_plan(key, plan, *self._present_log())

    def _calls_key(self) -> str:
        return json.dumps([self.setup, self.calls])

    def follow_requires_grad(self, unit: int, change: str):
        """A step begins after parameters were frozen or unfrozen: it follows the plan that was followed last when they
        required gradients as now, or a plan for the same points. Such a step need not pass these: then the one behind
        it is planned again. Returns the unit's pre-forward hook."""
        applied = self.applied
        requires_grad = tuple(tuple(one.shard.requires_grad for one in sharded) for sharded in applied.shards)
        try:
            key, plan = self._for_samepoints(requires_grad)
        except PlanError as error:
            raise RuntimeError(f"shardplan: {change} ({error})") from None
        if plan is not None:
            warnings.warn(f"shardplan: {change}; the step is planned again", stacklevel=2)
        self._go_to(key, plan)
        return applied.pre_forwards[unit]

    def _plan_again(self, log: list[tuple], requires_grad: RequiresGrad, full_precision: list[bool]):
        applied = self.applied
        plan = replan(
            applied.plan, log, class_names(applied.model), requires_grad, full_precision, self.setup, self.calls
        )
        if units_of(plan) != units_of(applied.plan):
            raise PlanError("the model has other modules or parameters than the plan")
        return plan

    def _start_plan(self, key: Key, plan, log: list[tuple], full_precision: list[bool]) -> None:
        """Follows a new plan, and keeps it. log, full_precision: as Path's."""
        applied = self.applied
        if not self.kept:  # the first plan
            requires_grad, calls = requires_grad_of(applied.plan), self._first_calls
            first = self._key(requires_grad, applied.plan, calls)
            self.kept[first] = Path(applied.plan, applied.groups, applied.runtime)
            self._key_of[self._way(requires_grad, applied.runtime.planned_log, [], calls)] = first
        groups = connect(
            lambda: process_groups(
                plan, applied.mesh, applied.given.values(), applied.made_groups, applied.timeout_s
            ),
            applied.timeout_s,
        )
        runtime = make_runtime(plan, applied.mesh, applied.device, groups, applied.memory, applied.timeout_s)
        step = applied.runtime.step
        self.kept[key] = Path(plan, groups, runtime, log, full_precision)
        while len(self.kept) > _MOST:
            self.kept.popitem(last=False)
        self.foresee()
        self._write_back()
        applied.unhook()
        applied.replay_by(plan, groups, runtime)
        for i, sharded in enumerate(applied.shards):
            if isinstance(sharded, FlatUnit):
                sharded.supply(runtime)
            else:
                supply_shards(runtime, i, plan.units[i], sharded)
        applied.start()
        applied.runtime.step = step
        if self.replans:
            self.fall_back_on_deviation()

    def _write_back(self) -> None:
        applied = self.applied
        for flat in applied.flat_units():
            flat.write_back()  # what the user replaced since

    def _take(self, key: Key) -> None:
        """A plan that was followed before is followed again."""
        applied = self.applied
        self.kept.move_to_end(key)
        path = self.kept[key]
        path.runtime.step = applied.runtime.step
        self._write_back()
        applied.unhook()
        applied.replay_by(path.plan, path.groups, path.runtime)
        for flat in applied.flat_units():
            flat.runtime = path.runtime
        applied.hook()
