# SPDX-License-Identifier: Apache-2.0
"""Planning that goes on after auto() has returned: the plan on disk, and one line about its cost."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time
import weakref
from typing import Any

import torch.distributed as dist

from .._plans.plan_store import PlanStore
from .._replay.applied import Applied


@dataclasses.dataclass
class Costs:
    """Costs of planning, printed once."""

    trace_s: float = 0.0
    plan_s: float = 0.0
    steps_before: int = 0  # by another plan, while there was none
    kept: bool = False  # the plan was on disk


class AutoPlanned:
    """The planning of one model by auto(). The search uses it as [Note: beside the training] says."""

    def __init__(
        self, applied: Applied, store: PlanStore, facts: dict[str, Any], ranks: list[int], costs: Costs, quiet: bool
    ) -> None:
        self._applied = weakref.ref(applied)
        self.store, self.facts, self.ranks, self.costs, self._quiet = store, facts, ranks, costs, quiet
        self._began = 0.0
        self._planned_again = self._searches = False
        applied.following.on_new_plan = self._note_new_plan
        applied.before_next_step(self.step_begins)

    @property
    def path(self) -> pathlib.Path | None:
        return self.store.path(self._applied().plan.model, self.facts)

    def _note_new_plan(self) -> None:
        self._planned_again = True
        if self._is_first_rank():
            self.store.write(self.path, self._applied().plan.json)

    def _is_first_rank(self) -> bool:
        return dist.get_rank() == self.ranks[0]

    def step_begins(self, *_entered: object) -> None:
        """The first one by a plan."""
        self._began = time.monotonic()
        self._applied().before_next_step(self._second_step)

    def search_begins(self) -> None:
        """The line that is printed waits for the step by the search's plan."""
        self._searches = True

    def search_ends(self, steps: int) -> None:
        """Called where that plan is taken. steps: how many went by another one meanwhile."""
        self._searches, self.costs.steps_before = False, steps
        applied = self._applied()
        applied.following.on_new_plan = self._note_new_plan
        if steps:
            self.step_begins()

    def _second_step(self, *_entered: object) -> None:
        applied = self._applied()
        took_s = time.monotonic() - self._began
        applied.following.on_new_plan = None
        if self._quiet or self._searches or not self._is_first_rank():
            return
        plan, costs = applied.plan, self.costs
        how = "on demand, since it left the order of the module tree" if self._planned_again else "as planned"
        made = "read from disk" if costs.kept else f"made in {costs.plan_s:.1f} s"
        beside = f" beside {costs.steps_before} steps of FSDP2's plan" if costs.steps_before else ""
        traced = f"traced in {costs.trace_s:.1f} s, " if costs.trace_s else ""
        where = f"; {self.path}" if self.path and self.path.exists() else ""
        print(
            f"shardplan: {plan.model}, {len(plan.units)} units on {plan.world_size} ranks: {traced}plan "
            f"{made}{beside}; the first step took "
            f"{took_s:.1f} s, {how}{where}",
            file=sys.stderr,
            flush=True,
        )
