# SPDX-License-Identifier: Apache-2.0
"""Runs the program of a case on a wrapped model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from shardplan.tracer.raising import Raised, raising
from shardplan.tracer.record import default_loss
from shardplan_conformance.case import Case


_OF_A_BACKWARD = ("finalize_backward", "wait_for_gradient_reduction")  # calls that end one


class Program:
    """`log` is the recorder: it is told the step and phase, and the optimizer's calls. `module_call` runs a setter or
    user call, `stepped` what follows every step of the optimizer. `exported`: functions of a file that `shardplan
    export` writes, by name; its calls on modules are run where they say."""

    def __init__(
        self,
        case: Case,
        model: nn.Module,
        optimizer,
        log,
        module_call: Callable[[dict], None],
        stepped: Callable[[], None] = lambda: None,
        exported: dict[str, Callable] | None = None,
    ):
        self._stepped, self._exported = stepped, exported or {}
        self._case, self._model, self._optimizer, self._log, self._module_call = (
            case, model, optimizer, log, module_call,
        )
        self._losses: dict[int, torch.Tensor] = {}

    def run(self) -> None:
        for step in range(self._case.step_count()):
            self._log.step, self._forwards, self._backwards = step, 0, 0
            for call in self._case.step(step):
                self._call(call)
            self._run_exported("after_step")

    def _call(self, call: dict) -> None:
        kind = call["call"]
        if kind == "forward":
            self._run_exported("before_forward", self._forwards)
            self._log.phase = "forward"
            self._forwards += 1
            self._forward(call)
        elif kind == "backward":
            self._run_exported("before_backward", self._backwards)
            self._log.phase = "backward"
            self._backwards += 1
            losses = [self._losses.pop(m) for m in sorted(call.get("microbatches", [0]), key=list(self._losses).index)]
            total = losses[0]
            for loss in losses[1:]:
                total = total + loss
            with contextlib.suppress(Raised):
                total.backward()
        elif kind == "module":
            self._log.phase = "backward" if call["method"] in _OF_A_BACKWARD else "forward"
            self._module_call(call)
        else:
            if kind == "optimizer_step":
                self._run_exported("before_optimizer_step")
            self._log.phase = "optim"
            self._log.add("optim_step" if kind == "optimizer_step" else "zero_grad", "")
            if kind == "zero_grad":
                (self._optimizer or self._model).zero_grad()
            else:
                if self._optimizer is not None:
                    self._optimizer.step()
                self._stepped()

    def _run_exported(self, name: str, *number: int) -> None:
        """In the phase of the last call on a module, which is the function's."""
        if name in self._exported:
            self._exported[name](self._model, *number)

    def _forward(self, call: dict) -> None:
        forward = self._case.forwards[call.get("trace", 0)]
        training = call.get("training", forward.grad)
        if self._model.training != training:
            self._model.train(training)
        grad = contextlib.nullcontext() if forward.grad else torch.no_grad()
        with grad, contextlib.suppress(Raised), raising(self._model, forward.raises_in, forward.raises_in_backward):
            output = self._model.get_submodule(forward.module)(*forward.args, **forward.kwargs)
            if forward.grad:
                microbatch = call.get("microbatch", 0)
                self._losses.pop(microbatch, None)
                self._losses[microbatch] = (self._case.loss or default_loss)(output)


class NoOptimizer:
    """Zeroes what one would have been given. (Of a unit that is unsharded the model's own zero_grad would drop the
    unsharded gradients.)"""

    def __init__(self, parameters: list[torch.Tensor]):
        self._parameters = parameters

    def step(self) -> None:
        pass

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def make_optimizer(strategy: dict, parameters) -> torch.optim.Optimizer | NoOptimizer | None:
    """None: there is none, or each parameter has its own, which steps in the backward; the model zeroes its
    gradients."""
    options = strategy.get("optimizer", {})
    kind = options.get("kind", "adamw")
    flat = strategy.get("policy", "fsdp2") == "fsdp1"
    trainable = [p for p in parameters if p.requires_grad]
    if kind == "none" or not trainable:
        return None if flat else NoOptimizer(trainable)
    arguments: dict = {"lr": 0.01, "foreach": False}
    if kind == "sgd":
        arguments["momentum"] = 0.9 if options.get("momentum") else 0.0
    kinds = {
        "sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "adam": torch.optim.Adam,
        "adafactor": torch.optim.Adafactor,
    }
    if not options.get("in_backward"):
        return kinds[kind](trainable, **arguments)
    if flat:
        _apply_optimizer_in_backward(kinds[kind], trainable, arguments, register_hook=False)
        return None
    for parameter in trainable:
        parameter.register_post_accumulate_grad_hook(_stepping(kinds[kind]([parameter], **arguments)))
    return NoOptimizer(trainable)


def _stepping(optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    def step(_parameter: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step
