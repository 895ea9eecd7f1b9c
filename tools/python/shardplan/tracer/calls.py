# SPDX-License-Identifier: Apache-2.0
"""The passes of a recording in the order of their calls, and the backwards that a loss runs itself.

Most losses return a number, and one backward follows. A loss may run backwards of its own: of the head on one chunk of
the hidden states after the other, say. Each of them ends the forward that is under way and is a pass, and what follows
it is a forward again.
"""

from __future__ import annotations

import contextlib
import functools
import unittest.mock
from collections.abc import Callable, Iterator

import torch
from torch import nn

from shardplan.tracer import placement
from shardplan.tracer.errors import TracerError
from shardplan.tracer.module_hooks import IDENTITY_NODE, ModuleHooks
from shardplan.tracer.raising import Raised
from shardplan.tracer.recorder import Recorder

# Functions of torch.autograd. The others call the last one. If somebody has taken a name for one of them before, only
# the last is seen, and the gradient of the loss is made in front of the pass.
_ENGINE = ("backward", "grad", "_engine_run_backward")
_FORWARD_AT = {"grad_ready": 4, "inputs_done": 3}  # where an event says which forward it is of
_OF_UNITS = (*_FORWARD_AT, "param_grad", "recompute_enter")


class LossRunsBackwards(Exception):
    """The loss runs backwards of its own, which are no part of the model's forward: the recording begins again, with
    the loss apart."""


class Calls:
    """forwards, backwards: the passes. order: ["forward", number] and ["backward", number], as they ran. regrouped:
    marks on inputs change how gradients are summed somewhere."""

    def __init__(
        self,
        module: nn.Module,
        recorder: Recorder,
        hooks: ModuleHooks,
        fqns: list[str],
        keep_nothing: bool,
        loss_apart: bool,
    ):
        """keep_nothing: no backward can run. loss_apart: the loss runs backwards of its own, and is no part of the
        model's forward."""
        self._module, self._recorder, self._hooks, self._fqns = module, recorder, hooks, fqns
        self._keep_nothing, self._loss_apart = keep_nothing, loss_apart
        self.forwards: list[dict] = []
        self.backwards: list[dict] = []
        self.order: list[list] = []
        self.regrouped = False

    def begin_forward(self) -> None:
        self._hooks.begin_forward(len(self.forwards))

    def end_forward(self, events: list[list] | None = None, abandoned: bool = False) -> None:
        """events: None: those recorded. abandoned: it raised."""
        events = self._recorder.take_events() if events is None else events
        if self._loss_apart and not events:
            return  # nothing is between two backwards, or behind the last
        self.order.append(["forward", len(self.forwards)])
        flags: dict = {} if torch.is_grad_enabled() else {"grad_enabled": False}
        if abandoned:
            flags["abandoned"] = True
        self.forwards.append(
            {"name": f"f{len(self.forwards)}", **flags, "tensors": self._hooks.tensors, "events": events}
        )

    def backward(self, outputs: list, run: Callable[[], object], forwards: list[int] | None = None) -> object:
        """Runs the backward of `outputs` as a pass. forwards: that it covers; None: those that it goes through."""
        try:
            result, events = self._run(outputs, run)
        except Raised:
            return self._add_backward(self._recorder.take_events(), forwards, abandoned=True)
        self._add_backward(events, forwards)
        return result

    def _run(self, outputs: list, run: Callable[[], object]) -> tuple[object, list[list]]:
        recorder = self._recorder
        self.regrouped |= any(placement.sums_are_regrouped(output, IDENTITY_NODE) for output in outputs)
        phase, recorder.phase = recorder.phase, "backward"
        end = contextlib.nullcontext()
        if outputs:
            end = outputs[0].register_hook(
                lambda _: _at_the_end_of_the_backward(lambda: recorder.emit(["backward_end"]))
            )
        outputs.clear()
        try:
            with end:  # another backward of the same output has its own
                result = run()
            return result, recorder.take_events()
        finally:
            recorder.phase = phase

    def _add_backward(self, events: list[list], forwards: list[int] | None, abandoned: bool = False) -> None:
        phase, self._recorder.phase = self._recorder.phase, "off"
        for parameter in self._module.parameters():
            parameter.grad = None
        self._recorder.phase = phase
        covered = forwards if forwards is not None else sorted(_forwards_of(events)) or [len(self.forwards) - 1]
        for event in events:
            if event[0] in _FORWARD_AT:
                event[_FORWARD_AT[event[0]]] = covered.index(event[_FORWARD_AT[event[0]]])
        self.order.append(["backward", len(self.backwards)])
        flags = {"abandoned": True} if abandoned else {}
        self.backwards.append({"name": f"b{len(self.backwards)}", **flags, "forwards": covered, "events": events})

    @contextlib.contextmanager
    def own_backwards(self) -> Iterator[None]:
        """Inside, a backward that the model or its loss runs is a pass."""

        def recorded(function: Callable) -> Callable:
            @functools.wraps(function)
            def run(outputs, *args, **kwargs):
                if self._recorder.in_backward() or self._recorder.phase not in ("forward", "loss"):
                    return function(outputs, *args, **kwargs)
                roots = (
                    [outputs]
                    if isinstance(outputs, torch.Tensor)
                    else [root for root in outputs if isinstance(root, torch.Tensor)]
                )
                return self._own_backward(roots, lambda: function(outputs, *args, **kwargs))

            return run

        with contextlib.ExitStack() as stack:
            for name in _ENGINE:
                stack.enter_context(
                    unittest.mock.patch.object(torch.autograd, name, recorded(getattr(torch.autograd, name)))
                )
            yield

    def _own_backward(self, outputs: list, run: Callable[[], object]) -> object:
        recorder = self._recorder
        if self._keep_nothing:
            raise TracerError("this forward keeps nothing for a backward")
        before, born = recorder.take_events(), len(recorder.storages)
        result, events = self._run(outputs, run)
        if not any(event[0] in _OF_UNITS for event in events):  # it goes through no module, and is work of the forward
            recorder.events = before + [event for event in events if event[0] != "backward_end"]
            for storage in recorder.storages[born:]:
                storage.phase = recorder.phase
            for storage in recorder.storages:
                storage.died = recorder.phase if storage.died == "backward" else storage.died
            return result
        if recorder.module_stack:
            fqn = self._fqns[recorder.module_stack[-1]]
            raise TracerError(
                f'the forward of "{fqn or "(root)"}" runs a backward through modules, which a trace does not have; a '
                'loss may run one'
            )
        if not self._loss_apart:
            raise LossRunsBackwards
        self.end_forward(before)
        self._add_backward(events, None)
        self.begin_forward()
        return result


def _forwards_of(events: list[list]) -> set[int]:
    return {event[_FORWARD_AT[event[0]]] for event in events if event[0] in _FORWARD_AT}


def _at_the_end_of_the_backward(function: Callable) -> None:
    """Runs `function` where FSDP's final callback runs: the engine is done, the caller still holds the loss and its
    gradient."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
