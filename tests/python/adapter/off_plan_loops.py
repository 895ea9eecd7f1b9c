# SPDX-License-Identifier: Apache-2.0
"""Cases of off_plan.py: training loops other than the planned one."""

from __future__ import annotations

import contextlib

import torch
from equivalence_settings import END, accumulation, case, micro
from flat_settings import case as flat_case
from flat_settings import no_sync
from off_plan import EQUAL, Side, off_plan
from off_plan_models_used import DEVIATES

ADDING = case("adding_two", program=[[*micro(0), *micro(1), *END]])
NO_SYNC = case("no_sync_two", program=accumulation(count=2))
FLAT, FLAT_ORIG = flat_case("flat"), flat_case("flat_orig", use_orig_params=True)
FLAT_NO_SYNC = flat_case("flat_no_sync", program=no_sync(2))
FLAT_ADDING = flat_case("flat_adding", program=[[*micro(0), *micro(1), *END]])
COUNTS = r"(micro-batch|optimizer\.step|zero_grad).*(expected|plan)"

# ---- optimizers ----


@off_plan()
def optimizer_of_some_parameters(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model, [model.head.weight, *model.layers[0].parameters()])
    for number in range(3):
        side.loss(model, number).backward()
        side.end_step(model, optimizer)
        model.zero_grad()


@off_plan()
def gradients_never_zeroed_of_some(side: Side) -> None:
    """zero_grad of an optimizer over a part: the other gradients add up."""
    model = side.model()
    side.train(model, side.optimizer(model, model.layers[0].parameters()), 0, 1, 2)


@off_plan()
def two_optimizers(side: Side) -> None:
    model = side.model()
    first = side.optimizer(model, model.layers.parameters())
    rest = [p for name, p in model.named_parameters() if not name.startswith("layers")]
    second = torch.optim.AdamW(rest, lr=1e-2)
    for number in range(3):
        side.loss(model, number).backward()
        first.step()
        side.end_step(model, second)
        first.zero_grad()


@off_plan()
def clipped(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(3):
        side.loss(model, number).backward()
        side.see("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        side.end_step(model, optimizer)


@off_plan(of=FLAT)
def flat_clipped(side: Side) -> None:
    import shardplan.torch as sp

    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(3):
        side.loss(model, number).backward()
        side.see("norm", model.clip_grad_norm_(0.05) if side.is_torch else sp.clip_grad_norm_(model, 0.05))
        side.end_step(model, optimizer)


@off_plan()
def stepped_twice(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(3):
        side.loss(model, number).backward()
        optimizer.step()
        side.end_step(model, optimizer)


@off_plan()
def stepped_without_backward(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    side.end_step(model, optimizer)
    side.train(model, optimizer, 0)
    side.end_step(model, optimizer)
    side.train(model, optimizer, 1)


@off_plan()
def never_zeroed(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(3):
        side.loss(model, number).backward()
        side.see_gradients(model)
        optimizer.step()
    side.see_parameters(model)


@off_plan()
def not_stepped_every_time(side: Side) -> None:
    """By hand: two backwards for each step of the optimizer, with a plan of one."""
    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(4):
        side.loss(model, number).backward()
        if number % 2 == 1:
            side.end_step(model, optimizer)


@off_plan()
def zeroed_in_place(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(3):
        side.loss(model, number).backward()
        side.see_gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    side.see_parameters(model)


@off_plan(of=ADDING, stop=(EQUAL, r"(zero_grad|gradient was dropped)"))
def zeroed_between_microbatches(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(2):
        side.loss(model, 2 * number).backward()
        optimizer.zero_grad()
        side.loss(model, 2 * number + 1).backward()
        side.end_step(model, optimizer)


@off_plan(of=ADDING, stop=(EQUAL, r"(zero_grad|gradient was dropped)"))
def zeroed_in_place_between_microbatches(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(2):
        side.loss(model, 2 * number).backward()
        optimizer.zero_grad(set_to_none=False)
        side.loss(model, 2 * number + 1).backward()
        side.end_step(model, optimizer)


# ---- numbers of micro-batches ----


def _accumulate(side: Side, *counts: int) -> None:
    """Only the last micro-batch of a step communicates."""
    model = side.model()
    optimizer = side.optimizer(model)
    for step, count in enumerate(counts):
        for micro_batch in range(count):
            last = micro_batch == count - 1
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            side.loss(model, 10 * step + micro_batch).backward()
        side.end_step(model, optimizer)


@off_plan(of=NO_SYNC)
def accumulated_as_planned(side: Side) -> None:
    _accumulate(side, 2, 2, 2)


@off_plan(of=NO_SYNC, stop=(EQUAL, COUNTS), replan=(EQUAL, COUNTS))
def accumulated_short(side: Side) -> None:
    _accumulate(side, 2, 2, 1, 2, 2)


@off_plan(of=NO_SYNC, stop=(EQUAL, COUNTS), replan=(EQUAL, COUNTS))
def accumulated_short_at_the_end(side: Side) -> None:
    _accumulate(side, 2, 1)


@off_plan(of=NO_SYNC, stop=(EQUAL, COUNTS), replan=(EQUAL, COUNTS))
def accumulated_short_at_first(side: Side) -> None:
    _accumulate(side, 1, 2, 2)


@off_plan(of=NO_SYNC, stop=(EQUAL, COUNTS), replan=(EQUAL, COUNTS))
def accumulated_longer(side: Side) -> None:
    _accumulate(side, 2, 3, 2)


@off_plan(of=ADDING, stop=(EQUAL, COUNTS))
def added_short(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    for count in (2, 1, 2, 3, 2):
        for number in range(count):
            side.loss(model, 10 * count + number).backward()
        side.end_step(model, optimizer)


def _flat_accumulate(side: Side, *counts: int) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    for step, count in enumerate(counts):
        for micro_batch in range(count):
            last = micro_batch == count - 1
            with contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
                side.loss(model, 10 * step + micro_batch).backward()
        side.end_step(model, optimizer)


@off_plan(of=FLAT_NO_SYNC)
def flat_accumulated_as_planned(side: Side) -> None:
    _flat_accumulate(side, 2, 2, 2)


@off_plan(of=FLAT_NO_SYNC, stop=(EQUAL, COUNTS), replan=(EQUAL, COUNTS))
def flat_accumulated_short(side: Side) -> None:
    _flat_accumulate(side, 2, 1, 2)


@off_plan(of=FLAT_ADDING, stop=(EQUAL, COUNTS))
def flat_added_short(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    for count in (2, 1, 2, 3, 2):
        for number in range(count):
            side.loss(model, 10 * count + number).backward()
        side.end_step(model, optimizer)


# ---- forwards and backwards ----


def _gradient_of_input(side: Side, model, number: int) -> None:
    x = side.input(number).requires_grad_()
    loss = model(x).square().mean()
    side.see("of the input", torch.autograd.grad(loss, x)[0])


@off_plan(stop=(EQUAL, DEVIATES))
def gradient_of_an_input_between_steps(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    side.train(model, optimizer, 0)
    _gradient_of_input(side, model, 7)
    side.see_gradients(model)
    side.train(model, optimizer, 1)


@off_plan(of=FLAT_ORIG, stop=(EQUAL, DEVIATES), replan=(EQUAL, DEVIATES))
def flat_gradient_of_an_input_between_steps(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    side.train(model, optimizer, 0)
    _gradient_of_input(side, model, 7)
    side.train(model, optimizer, 1)


@off_plan(stop=(EQUAL, DEVIATES))
def gradient_of_an_input_in_a_step(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    side.train(model, optimizer, 0)
    for number in (1, 2):
        x = side.input(number).requires_grad_()
        loss = model(x).square().mean()
        side.see("of the input", torch.autograd.grad(loss, x, retain_graph=True)[0])
        loss.backward()
        side.end_step(model, optimizer)


@off_plan(stop=(EQUAL, DEVIATES))
def backward_for_some_parameters(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    side.train(model, optimizer, 0)
    x = side.input(1).requires_grad_()
    model(x).square().mean().backward(inputs=[x])
    side.see("of the input", x.grad)
    side.end_step(model, optimizer)
    side.train(model, optimizer, 2)


@off_plan(stop=(EQUAL, DEVIATES))
def input_that_needs_a_gradient(side: Side) -> None:
    """The loop wants it in some steps."""
    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(3):
        x = side.input(number).requires_grad_(number != 1)
        model(x).square().mean().backward()
        if x.grad is not None:
            side.see("of the input", x.grad)
        side.end_step(model, optimizer)


@off_plan(stop=(EQUAL, DEVIATES))
def backward_twice(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    side.train(model, optimizer, 0)
    loss = side.loss(model, 1)
    loss.backward(retain_graph=True)
    loss.backward()
    side.end_step(model, optimizer)
    side.train(model, optimizer, 2)


@off_plan(stop=(EQUAL, DEVIATES))
def two_forwards_two_backwards(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    side.train(model, optimizer, 0)
    losses = [side.loss(model, number) for number in (1, 2)]
    for loss in losses:
        loss.backward()
    side.end_step(model, optimizer)
    side.train(model, optimizer, 3)


@off_plan(stop=(EQUAL, DEVIATES))
def two_forwards_two_backwards_reversed(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    side.train(model, optimizer, 0)
    losses = [side.loss(model, number) for number in (1, 2)]
    for loss in reversed(losses):
        loss.backward()
    side.end_step(model, optimizer)
    side.train(model, optimizer, 3)


@off_plan(stop=(EQUAL, DEVIATES))
def two_forwards_one_backward(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    side.train(model, optimizer, 0)
    (side.loss(model, 1) + side.loss(model, 2)).backward()
    side.end_step(model, optimizer)
    side.train(model, optimizer, 3)


@off_plan(of=FLAT, stop=(EQUAL, DEVIATES))
def flat_two_forwards_one_backward(side: Side) -> None:
    two_forwards_one_backward(side)


@off_plan(stop=(EQUAL, DEVIATES))
def forward_without_backward(side: Side) -> None:
    """With gradients, whose backward never comes."""
    model = side.model()
    optimizer = side.optimizer(model)
    side.train(model, optimizer, 0)
    side.loss(model, 1)
    side.train(model, optimizer, 2)
    side.train(model, optimizer, 3)


@off_plan()
def evaluated_between_forward_and_backward(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(3):
        loss = side.loss(model, number)
        with torch.no_grad():
            model.eval()
            side.loss(model, 50 + number)
            model.train()
        loss.backward()
        side.end_step(model, optimizer)


@off_plan()
def evaluated_before_the_first_step(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    with torch.no_grad():
        side.loss(model, 50)
    side.train(model, optimizer, 0, 1)


@off_plan()
def evaluated_in_inference_mode(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    side.train(model, optimizer, 0)
    with torch.inference_mode():
        output = model(side.input(9))
    side.see("sum", torch.tensor(float(output.sum())))
    side.train(model, optimizer, 1)


@off_plan(of=FLAT)
def flat_evaluated_between_steps(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    side.train(model, optimizer, 0)
    with torch.no_grad():
        model.eval()
        loss = side.loss(model, 9)
        model.train()
    assert not loss.requires_grad
    side.train(model, optimizer, 1)


# ---- exceptions ----


class _Refused(RuntimeError):
    pass


def _refuse(*_args) -> None:
    raise _Refused("out of memory")


def _caught_in_forward(side: Side, model, number: int) -> None:
    handle = model.layers[1].up.register_forward_pre_hook(_refuse)
    with contextlib.suppress(_Refused):
        model(side.input(number))
    handle.remove()


def _caught_in_backward(side: Side, model, number: int) -> None:
    handle = model.layers[1].register_forward_hook(lambda _m, _i, output: output.register_hook(_refuse) and None)
    loss = model(side.input(number)).square().mean()
    handle.remove()
    with contextlib.suppress(_Refused):
        loss.backward()


def _goes_on_after(side: Side, caught) -> None:
    """PyTorch's part is the same training without the step that was given up."""
    model = side.model()
    optimizer = side.optimizer(model)
    side.train(model, optimizer, 0, 1)
    if not side.is_torch:
        caught(side, model, 2)
        model.zero_grad()
    side.train(model, optimizer, 3, 4)


@off_plan()
def exception_in_forward(side: Side) -> None:
    _goes_on_after(side, _caught_in_forward)


@off_plan()
def exception_in_backward(side: Side) -> None:
    _goes_on_after(side, _caught_in_backward)


@off_plan()
def exception_in_the_first_forward(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    if not side.is_torch:
        _caught_in_forward(side, model, 2)
    side.train(model, optimizer, 0, 1)


def _state_after(side: Side, caught) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    side.train(model, optimizer, 0, 1)
    if not side.is_torch:
        caught(side, model, 2)
    for name, value in sorted(model.state_dict().items()):
        side.see(name, value)


@off_plan()
def state_dict_after_an_exception_in_forward(side: Side) -> None:
    _state_after(side, _caught_in_forward)


@off_plan()
def state_dict_after_an_exception_in_backward(side: Side) -> None:
    _state_after(side, _caught_in_backward)


@off_plan(of=FLAT)
def flat_exception_in_forward(side: Side) -> None:
    _goes_on_after(side, _caught_in_forward)


@off_plan(of=FLAT_ORIG)
def flat_exception_in_backward(side: Side) -> None:
    _goes_on_after(side, _caught_in_backward)


@off_plan()
def goes_on_after_a_deviation(side: Side) -> None:
    """A step that leaves the plan raises with "stop"; the user drops it and trains on."""
    model = side.model()
    optimizer = side.optimizer(model)
    side.train(model, optimizer, 0)
    if not side.is_torch:
        model.unused = (1,)
        with contextlib.suppress(RuntimeError):
            model(side.input(5)).square().mean().backward()
        model.unused = ()
        model.zero_grad()
    side.train(model, optimizer, 1, 2)

