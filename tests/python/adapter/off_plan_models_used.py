# SPDX-License-Identifier: Apache-2.0
"""Cases of off_plan.py: models that do what a plan may not expect, and parts of models used on their own."""

from __future__ import annotations

import torch
from equivalence_models import loss_of
from equivalence_settings import case
from flat_settings import case as flat_case
from off_plan import EQUAL, Side, off_plan
from off_plan_models import PACK

from shardplan.tracer.containers import tensors_in

BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
DEVIATES = r"(found|expected|parameter|module) .*on_deviation=\"replan\""
UNSEEN = r"unit layers\.\d: its backward is not seen to begin.*(use_reentrant=False|pytree)"
# Containers in which the installed PyTorch does not find the tensors: its own backward fails.
HIDDEN = [kind for kind, pack in PACK.items() if not tensors_in(pack(torch.ones(1)))]


def _plain(side: Side, steps: int = 3) -> None:
    model = side.model()
    side.train(model, side.optimizer(model), *range(steps))


def _packed(kind: str, suffix: str, widens: bool = False, **fields):
    return case(f"packed_{kind}{suffix}", model="packed", arguments={"kind": kind, "widens": widens}, **fields)


def _register_packed() -> None:
    for kind in PACK:
        for suffix, fields in (
            ("", {}),
            ("_kept", {"reshard_after_forward": False}),
            ("_bf16", {"reshard_after_forward": False, "mixed_precision": BF16, "widens": True}),
        ):

            def run(side: Side) -> None:
                _plain(side)

            run.__name__ = f"between_units_{kind}{suffix}"
            says = UNSEEN if kind in HIDDEN and not suffix else EQUAL
            off_plan(of=_packed(kind, suffix, **fields), stop=says)(run)


_register_packed()

for _reentrant in (False, True):
    for _flat in (False, True):
        _name = ("flat_" if _flat else "") + ("reentrant" if _reentrant else "nonreentrant")
        _make = flat_case if _flat else case

        def _around(side: Side) -> None:
            _plain(side)

        def _within(side: Side) -> None:
            _plain(side)

        _around.__name__, _within.__name__ = f"{_name}_checkpoint_of_units", f"{_name}_checkpoint_in_units"
        _of = _make(f"{_name}_checkpointed", model="checkpointed", arguments={"reentrant": _reentrant})
        off_plan(of=_of, stop=(EQUAL, UNSEEN) if _reentrant else EQUAL)(_around)
        off_plan(of=_make(f"{_name}_recomputing", model="recomputing", arguments={"reentrant": _reentrant}))(_within)


@off_plan(stop=(EQUAL, DEVIATES))
def whole_model_checkpointed_by_the_loop(side: Side) -> None:
    from torch.utils.checkpoint import checkpoint

    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(2):
        loss = loss_of(checkpoint(model, side.input(number), use_reentrant=False))
        side.see("loss", loss)
        loss.backward()
        side.end_step(model, optimizer)


# ---- parts of the model outside the root ----


@off_plan(stop=(EQUAL, DEVIATES))
def unit_called_on_its_own(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    side.train(model, optimizer, 0)
    loss = loss_of(model.layers[0](torch.ones(2, 10)))
    side.see("own loss", loss)
    loss.backward()
    side.end_step(model, optimizer)
    side.train(model, optimizer, 1)


@off_plan(stop=(EQUAL, DEVIATES))
def unit_called_before_the_root_in_a_step(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    side.train(model, optimizer, 0)
    more = loss_of(model.layers[0](torch.ones(2, 10)))
    (side.loss(model, 1) + more).backward()
    side.end_step(model, optimizer)
    side.train(model, optimizer, 2)


@off_plan()
def unit_called_without_gradients(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    side.train(model, optimizer, 0)
    with torch.no_grad():
        side.see("features", model.layers[0](torch.ones(2, 10)))
    side.train(model, optimizer, 1)


@off_plan(stop=(EQUAL, r"head.*(unit|root).*forward"), replan=(EQUAL, r"head.*(unit|root).*forward"))
def module_of_the_root_called_on_its_own(side: Side) -> None:
    """Its parameters are sharded then: PyTorch cannot, either."""
    model = side.model()
    side.train(model, side.optimizer(model), 0)
    try:
        model.head(torch.ones(2, 10))
    except RuntimeError:
        pass
    side.train(model, side.optimizer(model), 1)


@off_plan()
def weight_read_between_steps(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    side.train(model, optimizer, 0)
    side.see("head", model.head.weight.detach().full_tensor())
    side.see("norm", sum(p.detach().full_tensor().norm() for p in model.parameters()))
    side.train(model, optimizer, 1)


@off_plan(stop=(EQUAL, DEVIATES))
def weight_decay_in_the_loss(side: Side) -> None:
    """The sharded parameter is in the graph on its own."""
    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(2):
        decay = 0.1 * model.head.weight.square().sum().full_tensor()
        (side.loss(model, number) + decay).backward()
        side.end_step(model, optimizer)


# ---- branches ----


@off_plan(stop=DEVIATES)
def unit_skipped(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(4):
        model.unused = (1,) if number == 2 else ()
        side.train(model, optimizer, number)


@off_plan(stop=DEVIATES)
def last_unit_skipped(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(4):
        model.unused = (2,) if number >= 2 else ()
        side.train(model, optimizer, number)


@off_plan(stop=DEVIATES)
def alternating_branches(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(6):
        model.unused = (number % 2,)
        side.train(model, optimizer, number)


@off_plan(stop=DEVIATES)
def unit_used_twice(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(4):
        model.used_twice = 1 if number == 2 else None
        side.train(model, optimizer, number)


TUPLE = case("tuple", arguments={"outputs": "tuple"})


@off_plan(of=TUPLE, stop=(EQUAL, DEVIATES))
def one_of_two_outputs_used(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(3):
        y, x = model(side.input(number))
        loss = loss_of(x) if number == 1 else loss_of((y, x))
        side.see("loss", loss)
        loss.backward()
        side.end_step(model, optimizer)


@off_plan(of=TUPLE, stop=(EQUAL, DEVIATES))
def outputs_one_after_the_other(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(2):
        y, x = model(side.input(number))
        loss_of(y).backward(retain_graph=True)
        loss_of(x).backward()
        side.end_step(model, optimizer)


@off_plan()
def another_batch_size(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(3):
        loss = loss_of(model(torch.ones(3 + number, 7)))
        side.see("loss", loss)
        loss.backward()
        side.end_step(model, optimizer)


@off_plan()
def under_autocast(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = side.loss(model, number)
        loss.backward()
        side.end_step(model, optimizer)


@off_plan()
def two_models(side: Side) -> None:
    first, second = side.model(), side.model()
    optimizers = side.optimizer(first), side.optimizer(second)
    for number in range(2):
        (side.loss(first, number) + side.loss(second, 10 + number)).backward()
        side.end_step(first, optimizers[0])
        side.end_step(second, optimizers[1])

