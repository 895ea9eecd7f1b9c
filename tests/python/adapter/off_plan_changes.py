# SPDX-License-Identifier: Apache-2.0
"""Cases of off_plan.py: what a user does to the model between steps."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
from equivalence import local
from equivalence_settings import case
from flat_equivalence import clean
from flat_settings import case as flat_case
from off_plan import EQUAL, Side, off_plan

BY_PLAN_AGAIN = r"(plan .*again|on_deviation=\"replan\"|apply it again|before shardplan\.torch\.apply)"
FROZEN_UNIT = case("frozen_unit", arguments={"frozen": ["layers.1"]})
FROZEN_ONE = case("frozen_one", arguments={"frozen": ["layers.1.up.weight"]})
TIED = case(
    "tied",
    arguments={"tied": True},
    units=[{"modules": ["layers.0", "layers.2"], "group": True}, {"modules": ["layers.1"]}, {"modules": [""]}],
)
FLAT, FLAT_ORIG = flat_case("flat"), flat_case("flat_orig", use_orig_params=True)


def names(parameter: str) -> tuple[str, str]:
    """EQUAL, or a message with the parameter's name and the way out."""
    return EQUAL, rf"parameter {parameter}.*{BY_PLAN_AGAIN}"


# ---- ties ----


def _tie(model: nn.Module) -> None:
    model.layers[2].up.weight = model.layers[0].up.weight


TIE_SAYS = rf"layers\.2\.up\.weight.*layers\.0\.up\.weight.*{BY_PLAN_AGAIN}"


@off_plan(stop=TIE_SAYS, replan=TIE_SAYS)
def tied_after_apply(side: Side) -> None:
    """Before the first step PyTorch's units share the shard; later it forgets the tie."""
    model = side.model()
    _tie(model)
    side.train(model, side.optimizer(model), 0, 1, 2)


@off_plan(stop=TIE_SAYS, replan=TIE_SAYS)
def tied_after_a_step(side: Side) -> None:
    model = side.model()
    side.train(model, side.optimizer(model), 0)
    _tie(model)
    side.train(model, side.optimizer(model), 1, 2)


@off_plan(of=TIED)
def tied_in_one_unit(side: Side) -> None:
    model = side.model()
    side.train(model, side.optimizer(model), 0, 1, 2)


@off_plan(of=TIED)
def tied_again_after_apply(side: Side) -> None:
    """transformers' tie_weights does this: nothing changes."""
    model = side.model()
    side.train(model, side.optimizer(model), 0)
    _tie(model)
    side.train(model, side.optimizer(model), 1, 2)


UNTIED_SAYS = rf"layers\.[02]\.up\.weight.*{BY_PLAN_AGAIN}"


@off_plan(of=TIED, stop=(EQUAL, UNTIED_SAYS), replan=(EQUAL, UNTIED_SAYS))
def untied_after_apply(side: Side) -> None:
    model = side.model()
    side.train(model, side.optimizer(model), 0)
    model.layers[2].up.weight = nn.Parameter(model.layers[0].up.weight.detach().clone())
    side.train(model, side.optimizer(model), 1, 2)


@off_plan(of=FLAT_ORIG, stop=(EQUAL, TIE_SAYS), replan=(EQUAL, TIE_SAYS))
def flat_tied_after_a_step(side: Side) -> None:
    model = side.model()
    side.train(model, side.optimizer(model), 0)
    _tie(model)
    side.train(model, side.optimizer(model), 1, 2)


# ---- freezing ----


def _set_requires_grad(side: Side, prefix: str, value: bool) -> None:
    model = side.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    side.train(model, optimizer, 0, 1)
    for name, parameter in model.named_parameters():
        if prefix in clean(name):
            parameter.requires_grad_(value)
    side.train(model, optimizer, 2, 3)


@off_plan(stop=names(r"layers\.1\.up\.weight"))
def parameter_frozen(side: Side) -> None:
    _set_requires_grad(side, "layers.1.up.weight", False)


@off_plan(stop=names(r"layers\.1\."))
def unit_frozen(side: Side) -> None:
    _set_requires_grad(side, "layers.1.", False)


@off_plan(of=FROZEN_ONE, stop=names(r"layers\.1\.up\.weight"))
def parameter_unfrozen(side: Side) -> None:
    _set_requires_grad(side, "layers.1.up.weight", True)


@off_plan(of=FROZEN_UNIT, stop=names(r"layers\.1\."))
def unit_unfrozen(side: Side) -> None:
    _set_requires_grad(side, "layers.1.", True)


@off_plan(stop=names(r"layers\.1\.up\.weight"))
def frozen_and_back(side: Side) -> None:
    """A GAN does this with its other half."""
    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(4):
        model.layers[1].up.weight.requires_grad_(number % 2 == 0)
        side.train(model, optimizer, number)


@off_plan(stop=names(r"\S+"))
def unfrozen_layer_by_layer(side: Side) -> None:
    """Fine-tuning that begins with the head."""
    model = side.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(6):
        for name, parameter in model.named_parameters():
            trains = name.startswith("head") or any(name.startswith(f"layers.{k}.") for k in range(3 - number // 2, 4))
            parameter.requires_grad_(trains)
        side.train(model, optimizer, number)


@off_plan(of=FLAT_ORIG, stop=names(r"layers\.1\.up\.weight"), replan=names(r"layers\.1\.up\.weight"))
def flat_parameter_frozen(side: Side) -> None:
    _set_requires_grad(side, "layers.1.up.weight", False)


@off_plan(of=FLAT, stop=names(r"layers\.1\."), replan=names(r"layers\.1\."))
def flat_unit_frozen(side: Side) -> None:
    """FSDP1 shows one parameter of the unit."""
    _set_requires_grad(side, "layers.1.", False)


@off_plan(of=FLAT_ORIG, stop=names(r"layers\.1\."), replan=names(r"layers\.1\."))
def flat_orig_unit_frozen(side: Side) -> None:
    _set_requires_grad(side, "layers.1.", False)


# ---- dtypes, devices, copies ----


def _trained_as(side: Side, change) -> None:
    model = side.model()
    side.train(model, side.optimizer(model), 0)
    change(model)
    side.train(model, side.optimizer(model), 1, 2)


@off_plan(stop=names(r"\S+"), replan=names(r"\S+"))
def to_bfloat16(side: Side) -> None:
    _trained_as(side, lambda model: model.to(torch.bfloat16))


@off_plan(stop=names(r"\S+"), replan=names(r"\S+"))
def to_bfloat16_before_the_first_step(side: Side) -> None:
    model = side.model().to(torch.bfloat16)
    side.train(model, side.optimizer(model), 0, 1)


@off_plan(stop=names(r"\S+"), replan=names(r"\S+"))
def to_double(side: Side) -> None:
    _trained_as(side, lambda model: model.double())


@off_plan()
def to_bfloat16_and_back(side: Side) -> None:
    _trained_as(side, lambda model: model.to(torch.bfloat16).to(torch.float32))


@off_plan(of=FLAT, stop=names(r"\S+"), replan=names(r"\S+"))
def flat_to_bfloat16(side: Side) -> None:
    _trained_as(side, lambda model: model.to(torch.bfloat16))


@off_plan(of=FLAT_ORIG, stop=names(r"\S+"), replan=names(r"\S+"))
def flat_orig_to_bfloat16(side: Side) -> None:
    _trained_as(side, lambda model: model.to(torch.bfloat16))


@off_plan()
def copied_before_apply(side: Side) -> None:
    kept = []
    model = side.model(lambda model: kept.append(copy.deepcopy(model)))
    side.train(model, side.optimizer(model), 0, 1)
    side.see("of the copy", kept[0].head.weight)


COPY_SAYS = r"deepcopy.*state_dict"


@off_plan(stop=COPY_SAYS, replan=COPY_SAYS)
def copied_after_apply(side: Side) -> None:
    """FSDP2 refuses it, too."""
    copy.deepcopy(side.model())


@off_plan(stop=COPY_SAYS, replan=COPY_SAYS)
def unit_copied_after_apply(side: Side) -> None:
    copy.deepcopy(side.model().layers[0])


@off_plan()
def head_copied_after_apply(side: Side) -> None:
    """A module that is no unit: a copy of its shards."""
    model = side.model()
    side.train(model, side.optimizer(model), 0)
    side.see("copy", copy.deepcopy(model.head).weight)
    side.train(model, side.optimizer(model), 1)


# ---- modules and parameters replaced or added ----

SAYS_MODULE = r"module layers\.1 was replaced.*on_deviation=\"replan\""


@off_plan(stop=SAYS_MODULE)
def module_replaced(side: Side) -> None:
    """By one that nobody shards: its gradients are the rank's own."""
    model = side.model()
    side.train(model, side.optimizer(model), 0)
    torch.manual_seed(3)
    model.layers[1] = nn.Linear(10, 10)
    side.train(model, side.optimizer(model), 1, 2)


@off_plan()
def module_added(side: Side) -> None:
    """After the plan was made and applied: an adapter that nobody shards."""
    model = side.model()
    side.train(model, side.optimizer(model), 0)
    torch.manual_seed(3)
    adapter = nn.Linear(7, 7)
    head = model.head.forward
    model.head.forward = lambda x: adapter(head(x))
    optimizer = torch.optim.SGD([*model.parameters(), *adapter.parameters()], lr=0.1)
    for number in (1, 2):
        side.loss(model, number).backward()
        side.see("adapter's gradient", adapter.weight.grad)
        side.end_step(model, optimizer)


@off_plan()
def loaded_between_steps(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    side.train(model, optimizer, 0)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    side.train(model, optimizer, 1)
    model.load_state_dict(kept)
    side.train(model, optimizer, 2)


@off_plan()
def gradient_changed_by_the_user(side: Side) -> None:
    model = side.model()
    optimizer = side.optimizer(model)
    for number in range(3):
        side.loss(model, number).backward()
        for parameter in model.parameters():
            local(parameter.grad).mul_(0.5)
        model.head.bias.grad = None
        side.end_step(model, optimizer)

