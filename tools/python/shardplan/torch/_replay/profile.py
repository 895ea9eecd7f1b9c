# SPDX-License-Identifier: Apache-2.0
"""A model that trains by a plan measures its own steps: a report of the same schema as `shardplan simulate
--report`."""

from __future__ import annotations

import json
import os
import sys
from types import TracebackType
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from shardplan.files import write_text
from shardplan.import_profile import kineto, recorded
from shardplan.import_profile.report import report_of

from .._job.arguments import whole_number
from .._job.native import native
from .._plans.planning import simulated_report
from .applied import Applied, applied_to
from .optimizers import trains


class Profile:
    """The context that `profile` returns."""

    def __init__(self, applied: Applied, steps: int, warmup: int, quiet: bool) -> None:
        self._applied = applied
        self._steps, self._warmup, self._quiet = steps, warmup, quiet
        self._hook = None
        self._recordings: list[tuple[Any, str]] = []  # (plan, recording), one for each plan that was followed
        self._reports: dict[bool, dict] = {}

    def __enter__(self) -> Profile:
        if self._recordings or self._hook is not None:
            raise RuntimeError("shardplan.torch.profile: a profile is entered once; call profile again for another one")
        if self._applied.profile is not None:
            raise RuntimeError(
                "shardplan.torch.profile: the model is being profiled already (found a profile inside another one, "
                "expected one at a time)"
            )
        self._start(self._warmup)
        self._applied.note_profile(self)
        self._hook = register_optimizer_step_post_hook(self._optimizer_stepped)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._hook.remove()
        self._applied.note_profile(None)
        try:
            self._stop()
        except RuntimeError:
            if kind is None:  # else the ranks cannot go on, and what was raised first says why
                raise
        if kind is None and not self._quiet and dist.get_rank() == 0:
            print(f"shardplan: {self._said()}", file=sys.stderr, flush=True)

    def _start(self, warmup: int) -> None:
        self._plan, self._runtime = self._applied.plan, self._applied.runtime
        self._runtime.start_recording(warmup, self._steps)

    def _stop(self) -> None:
        self._recordings.append((self._plan, self._runtime.stop_recording()))

    def followed(self) -> None:
        """The model follows a plan, this one or another: then its steps are recorded, as if they were the first
        ones."""
        if self._applied.runtime is not self._runtime:
            self._stop()
            self._start(max(1, self._warmup))

    def _optimizer_stepped(self, optimizer: Optimizer, _args: tuple, _kwargs: dict) -> None:
        if trains(optimizer, self._applied):
            self._applied.runtime.optimizer_stepped()

    @property
    def done(self) -> bool:
        """Whether as many steps are recorded as were asked for, and as many have passed between them."""
        return self._hook is not None and self._runtime.has_recorded

    def _recording(self) -> tuple[Any, dict]:
        """(plan, recording) of the plan that most steps were recorded of, of several the last. Steps that left any plan
        are counted in it."""
        if self._applied.profile is self or not self._recordings:
            raise RuntimeError("shardplan.torch.profile: the report is there when the context has ended")
        read = [(plan, json.loads(text)) for plan, text in self._recordings]
        plan, document = max(reversed(read), key=lambda one: len(one[1]["steps"]))
        return plan, {**document, "abandoned": sum(other["abandoned"] for _, other in read)}

    def _said(self) -> str:
        _, document = self._recording()
        if not document["steps"]:
            return "no whole step of the plan was recorded: a step ends where the next one begins"
        return f"{len(document['steps'])} steps recorded; {recorded.cost_text(document)}"

    def report(self, all_ranks: bool = False) -> dict[str, Any]:
        """This rank's report (docs/reference/report-format.md). all_ranks: collective; the time that it waits for other
        ranks is then told apart from that of the transfers."""
        if all_ranks not in self._reports:
            self._reports[all_ranks] = self._make_report(all_ranks)
        return self._reports[all_ranks]

    def _make_report(self, all_ranks: bool) -> dict[str, Any]:
        plan, document = self._recording()
        try:
            own = recorded.profile_of("shardplan.torch.profile", document, json.loads(plan.json))
        except kineto.BadProfile as error:
            raise RuntimeError(str(error)) from None
        others = []
        if all_ranks and dist.get_world_size() > 1:
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, (own.rank, recorded.collectives_of(own)))
            others = [recorded.of_other_rank(rank, own.world_size, work) for rank, work in gathered if rank != own.rank]
        return report_of(own, others, json.loads(plan.json), simulated_report(plan.json), None)

    def save(self, path: str | os.PathLike, all_ranks: bool = False) -> None:
        """Writes the report, for `shardplan compare`. all_ranks: every rank calls it, and the first one writes."""
        report = self.report(all_ranks)
        if not all_ranks or dist.get_rank() == 0:
            write_text(path, json.dumps(report, indent=2) + "\n")


def count_cpu_memory() -> None:
    """From now on the memory of CPU tensors is counted, for `profile` on CPU ranks: called by the thread that trains,
    before the model is made. Memory inside of collectives is left out. Without it a profile there knows the plan's own
    buffers. It lasts as long as the process. GPUs need no such call."""
    native.count_cpu_memory()


def profile(model: nn.Module, *, steps: int = 3, warmup: int = 1, quiet: bool = False) -> Profile:
    """Records what the plan's instructions and the model's own work between them take, and what is allocated:

        with shardplan.torch.profile(model, steps=3) as profile:
            for batch in data:
                train(batch)
                if profile.done:
                    break
        profile.save("measured.json")

    Behind `warmup` steps, `steps` steps are recorded; between them as many pass that are not, which shows what
    recording costs: it is printed on the first rank (unless `quiet`) and is in the report. A step lasts until the next
    one begins, so the loop makes one step more than these. Other steps cost nothing.
    """
    return Profile(applied_to(model), whole_number("steps", steps, 1), whole_number("warmup", warmup, 0), quiet)
