# SPDX-License-Identifier: Apache-2.0
"""policy="optimize": from the first forward's arguments to the plan that the search finds.

[Note: beside the training] The first forward is traced where it begins, on the first rank. If FSDP2's plan of that
trace keeps within the budget, steps go by it while the search runs in a process of its own. All ranks take its plan at
the begin of the same step. Else the first step waits.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.nn as nn

from .._job.arguments import PlanError
from .._job.first_rank import AgreedMoment, from_first_rank
from .._model.forwards import described
from .._plans.documents import plan_of
from .._plans.planning import asked_memory, make_plan, with_muon_steps
from .._replay.applied import Applied
from .auto_planned import AutoPlanned
from .switch import switch


class Search:
    def __init__(
        self,
        applied: Applied,
        strategy: dict[str, Any],
        where: list[str],
        searched: list[str],
        loss: Callable | None,
        planned: AutoPlanned,
        timeout_s: float,
    ) -> None:
        """where: arguments of `shardplan plan`. searched: what `shardplan optimize` takes besides; the first two are
        the budget."""
        self._applied = weakref.ref(applied)
        self._strategy, self._where, self._searched = strategy, where, searched
        self._loss, self._planned, self._timeout_s = loss, planned, timeout_s
        self._found: list[str | PlanError] = []  # on the first rank, once there is something
        self._moment: AgreedMoment | None = None
        self._steps = 0

    def begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Called where the first step begins. Collective."""
        planned = self._planned
        if answer := from_first_rank(lambda: self._first(module, args, kwargs), planned.ranks, self._timeout_s):
            switch(self._applied(), plan_of(answer))
            return planned.search_ends(0)
        planned.search_begins()
        self._moment = AgreedMoment(planned.ranks, self._timeout_s)
        self._await_next_step()

    def _await_next_step(self) -> None:
        self._applied().before_next_step(self._step_begins)

    def _step_begins(self, *_entered: object) -> None:
        self._steps += 1
        if not self._moment.has_come(bool(self._found)):
            return self._await_next_step()
        switch(self._applied(), plan_of(from_first_rank(self._result, self._planned.ranks, self._timeout_s)))
        self._planned.search_ends(self._steps)

    def _result(self) -> str:
        if isinstance(self._found[0], PlanError):
            raise self._found[0]
        return self._found[0]

    def _first(self, module: nn.Module, args: tuple, kwargs: dict) -> str:
        """The first rank's: a plan. "": one is on its way."""
        planned = self._planned
        if module is not self._applied().model:
            raise PlanError(
                "the search needs the whole forward's arguments, and the first module that ran is a "
                f"{type(module).__name__}: call the model itself"
            )
        planned.facts["inputs"] = described((args, kwargs))
        if (kept := planned.store.read(planned.path)) is not None:
            planned.costs.kept = True
            return kept
        planned.costs.kept = False
        began = time.monotonic()
        try:
            trace = self._applied().skeleton.trace(args, kwargs, self._loss)
            trace = with_muon_steps(trace, self._strategy, self._where)  # patches torch, so not beside the training
        except PlanError as error:
            raise PlanError(f'policy="optimize" needs a trace of the model: {error}') from error
        planned.costs.trace_s = time.monotonic() - began
        path = planned.path
        if not self._fits_as_it_is(trace):
            return self._search(trace, path)

        def beside() -> None:
            try:
                self._found.append(self._search(trace, path))
            except Exception as error:  # told on all ranks
                self._found.append(error if isinstance(error, PlanError) else PlanError(f"the search failed: {error}"))

        threading.Thread(target=beside, name="shardplan-search").start()
        return ""

    def _search(self, trace: dict[str, Any], path) -> str:
        began = time.monotonic()
        text = make_plan("optimize", trace, self._strategy, [*self._where, *self._searched])
        self._planned.costs.plan_s = time.monotonic() - began
        self._planned.store.write(path, text)
        return text

    def _fits_as_it_is(self, trace: dict[str, Any]) -> bool:
        """Does the plan that the model follows now keep within the budget?"""
        try:
            return asked_memory(make_plan("plan", trace, self._strategy, self._where), arguments=self._searched[:2])[
                "fits"
            ]
        except PlanError:
            return False  # the search says why
