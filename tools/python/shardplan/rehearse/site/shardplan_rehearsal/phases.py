# SPDX-License-Identifier: Apache-2.0
"""Steps and phases of a training script, from torch's public hooks: forwards of modules, backwards of autograd, steps
of optimizers.

    setup | forward | backward | (forward | backward ...) | optimizer | forward of the next step ...
          ^ first module       ^ autograd's engine ends    ^ Optimizer.step returns

Work behind a backward belongs to the optimizer if that comes next (clipping of gradients), else to the next forward.
Work behind an optimizer belongs to the next step's forward. A second optimizer without a backward in between is of the
same step. A step has ended when the next module runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from types import ModuleType
from typing import NamedTuple

from . import device, recording
from .peaks import Peaks
from .run import the_run

SETUP, FORWARD, BACKWARD, OPTIMIZER = "setup", "forward", "backward", "optimizer"
_AFTER_BACKWARD, _AFTER_OPTIMIZER = "after backward", "after optimizer"


@dataclasses.dataclass
class Stretch:
    """From one boundary to the next."""

    step: int  # from 1; 0: setup
    phase: str
    begin_us: int
    end_us: int
    allocated_bytes: int  # the most, in it
    reserved_bytes: int
    retries: int  # in it
    out_of_memory: int


class Known(NamedTuple):
    """An optimizer's or a module's description of one of its tensors."""

    stretch: int  # in which it says so
    address: int  # of the storage
    category: str
    module: str  # whose parameter it is


class Recorder:
    """The state of the run. Boundaries are passed by the script's main thread; autograd's threads run inside a
    backward."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._peaks = Peaks(torch)
        self.stretches: list[Stretch] = []
        self.optimizers: list[object] = []
        self.addresses: list[Known] = []
        self.place_in_job: tuple[int, int] | None = None  # rank and ranks, of the process group
        self.phase, self.step, self.steps_done = SETUP, 0, 0
        self.backwards = self._optimizers_running = self._depth = 0
        self.steady_bytes = 0  # allocated when the last step had ended
        self._begin_us = _now_us()
        self._retries = self._out_of_memory = 0
        self._stepped_inside = False
        self._most_bytes = self._addresses_kept = 0
        self.when_done = None  # called when the steps that were asked for have ended
        self.when_step_ends = None
        self.when_boundary = None  # called behind each
        self.name_of_parameter = lambda _parameter: ""  # the module that has it

    def module_runs(self) -> None:
        """A module's forward begins."""
        if self.phase in (FORWARD, BACKWARD, OPTIMIZER):
            return
        if self.phase == SETUP:
            self._close(SETUP)
            self.step = 1
        elif self.phase == _AFTER_OPTIMIZER:
            self._end_step()
        self.phase = FORWARD

    def backward_begins(self) -> None:
        self._depth += 1
        if self._depth > 1 or self._optimizers_running:
            return
        self.module_runs()
        self._close(FORWARD)
        self.phase = BACKWARD
        self.backwards += 1

    def backward_ends(self) -> None:
        self._depth -= 1
        if self._depth or self._optimizers_running:
            return
        self._close(BACKWARD)
        self.phase = _AFTER_OPTIMIZER if self._stepped_inside else _AFTER_BACKWARD
        self._stepped_inside = False

    def optimizer_begins(self, optimizer) -> None:
        self._optimizers_running += 1
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        self._learn(optimizer, states=False)
        if self._depth or self._optimizers_running > 1:
            return
        if self.phase in (SETUP, FORWARD):
            self.module_runs()
            self._close(FORWARD)
        self.phase = OPTIMIZER

    def optimizer_ends(self, optimizer) -> None:
        self._optimizers_running -= 1
        self._learn(optimizer, states=True)
        if self._depth:
            self._stepped_inside = True
        elif not self._optimizers_running:
            self._close(OPTIMIZER)
            self.phase = _AFTER_OPTIMIZER

    def end(self) -> None:
        """The run ends here: what is under way is of the phase that it is in."""
        if self.phase == _AFTER_OPTIMIZER:
            self.steps_done = self.step
            self.steady_bytes = self._current()
        phase = {_AFTER_BACKWARD: OPTIMIZER, _AFTER_OPTIMIZER: OPTIMIZER}.get(self.phase, self.phase)
        self._close(phase)

    def place(self) -> str:
        """The run's place, for people."""
        return self.phase if self.phase == SETUP else f"{self.phase} of step {self.step}"

    def _end_step(self) -> None:
        self.steps_done = self.step
        self.steady_bytes = self._current()
        self._forget_addresses()
        if self.steps_done == the_run().steps and self.when_done is not None:
            self.when_done()
        elif self.when_step_ends is not None:
            self.when_step_ends()
        self.step += 1

    def _forget_addresses(self) -> None:
        """Drops addresses of a step that is not the peak: a long run would keep them all."""
        own = itertools.takewhile(lambda stretch: stretch.step == self.step, reversed(self.stretches))
        most = max((stretch.allocated_bytes for stretch in own), default=0)
        if most <= self._most_bytes:
            del self.addresses[self._addresses_kept :]
        self._most_bytes, self._addresses_kept = max(most, self._most_bytes), len(self.addresses)

    def _current(self) -> int:
        return self._torch.cuda.memory_allocated() if self._torch.cuda.is_initialized() else 0

    def _close(self, phase: str) -> None:
        now = _now_us()
        stretch = Stretch(self.step, phase, self._begin_us, now, 0, 0, 0, 0)
        distributed = self._torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            self.place_in_job = distributed.get_rank(), distributed.get_world_size()
        if self._torch.cuda.is_initialized():
            device.take_communicators()
            stats = self._peaks.boundary(self._torch.cuda.current_device())
            stretch.allocated_bytes = stats["allocated_bytes"]["all"]["peak"]
            stretch.reserved_bytes = stats["reserved_bytes"]["all"]["peak"]
            stretch.retries, self._retries = stats["num_alloc_retries"] - self._retries, stats["num_alloc_retries"]
            stretch.out_of_memory, self._out_of_memory = stats["num_ooms"] - self._out_of_memory, stats["num_ooms"]
        self.stretches.append(stretch)
        recording.phase(phase, self.step)
        self._begin_us = now
        if self.when_boundary is not None:
            self.when_boundary()

    def learn_parameters(self, parameters) -> None:
        self._note(((parameter, parameter) for parameter in parameters), "param_sharded")

    def _learn(self, optimizer, states: bool) -> None:
        """Addresses of an optimizer's parameters, gradients and states."""
        parameters = [
            parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group.get("params", ())
        ]
        self.learn_parameters(parameters)
        self._note(((parameter, parameter.grad) for parameter in parameters), "grad_sharded")
        if states:
            state = getattr(optimizer, "state", {})
            self._note(
                ((parameter, tensor) for parameter in list(state) for tensor in _tensors(state[parameter])),
                "optimizer_state",
            )

    def _note(self, pairs, category: str) -> None:
        """pairs: a parameter, and a tensor that belongs to it."""
        here = len(self.stretches)
        for parameter, tensor in pairs:
            if (address := _address(tensor)) is not None:
                self.addresses.append(Known(here, address, category, self.name_of_parameter(parameter)))


def _tensors(state, depth: int = 0):
    """Every tensor in an optimizer's state."""
    if hasattr(state, "data_ptr"):
        yield state
    elif isinstance(state, dict) and depth < 4:
        for value in list(state.values()):
            yield from _tensors(value, depth + 1)
    elif isinstance(state, list | tuple) and depth < 4:
        for value in state:
            yield from _tensors(value, depth + 1)


def _address(tensor) -> int | None:
    """Address of the storage in device memory that this rank has of the tensor."""
    try:
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor is None or not tensor.is_cuda:
            return None
        return tensor.untyped_storage().data_ptr() or None
    except (AttributeError, NotImplementedError, RuntimeError):  # subclasses without a storage of their own
        return None


def _now_us() -> int:
    return time.time_ns() // 1000


def begin(torch: ModuleType) -> Recorder:
    recorder = Recorder(torch)
    main = threading.get_ident()

    def on_main(action, *arguments) -> None:
        if threading.get_ident() == main:
            action(*arguments)

    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(lambda optimizer, *_: recorder.optimizer_begins(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: recorder.optimizer_ends(optimizer))
    run_engine = torch.autograd.graph._engine_run_backward

    def _engine_run_backward(*arguments, **settings):
        on_main(recorder.backward_begins)
        try:
            return run_engine(*arguments, **settings)
        finally:
            on_main(recorder.backward_ends)

    torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward = _engine_run_backward
    return recorder
