# SPDX-License-Identifier: Apache-2.0
"""Cases of off_plan.py: torch.distributed.checkpoint of model and optimizer, and checkpoints of one kind loaded by the
other."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from flat_settings import case as flat_case
from off_plan import Side, off_plan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

FLAT, FLAT_ORIG = flat_case("flat"), flat_case("flat_orig", use_orig_params=True)
FLAT_SAYS = r"slice of a flat parameter.*get_optimizer_state_dict"


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _saved_and_loaded(side: Side, **options) -> None:
    """Saved after two steps, loaded into a fresh model with a fresh optimizer, which trains on as the first one."""
    chosen = StateDictOptions(**options)
    model = side.model()
    optimizer = _adamw(model)
    side.train(model, optimizer, 0, 1)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=chosen)))
    dcp.save(state, checkpoint_id=side.folder)
    side.train(model, optimizer, 2, 3)

    other = side.model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    fresh = _adamw(other)
    state = dict(zip(("model", "optimizer"), get_state_dict(other, fresh, options=chosen)))
    dcp.load(state, checkpoint_id=side.folder)
    set_state_dict(
        other, fresh, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=chosen
    )
    side.train(other, fresh, 2, 3)


@off_plan()
def checkpoint(side: Side) -> None:
    _saved_and_loaded(side)


@off_plan()
def checkpoint_whole(side: Side) -> None:
    _saved_and_loaded(side, full_state_dict=True)


@off_plan(of=FLAT)
def flat_checkpoint(side: Side) -> None:
    _saved_and_loaded(side)


@off_plan(of=FLAT)
def flat_checkpoint_whole(side: Side) -> None:
    _saved_and_loaded(side, full_state_dict=True)


@off_plan(of=FLAT_ORIG)
def flat_orig_checkpoint(side: Side) -> None:
    _saved_and_loaded(side)


@off_plan(of=FLAT_ORIG)
def flat_orig_checkpoint_whole(side: Side) -> None:
    _saved_and_loaded(side, full_state_dict=True)


@off_plan(of=FLAT)
def flat_checkpoint_flattened(side: Side) -> None:
    _saved_and_loaded(side, flatten_optimizer_state_dict=True)


@off_plan(of=FLAT_ORIG)
def flat_orig_checkpoint_flattened(side: Side) -> None:
    _saved_and_loaded(side, flatten_optimizer_state_dict=True)


def _from_rank_0(side: Side) -> None:
    """The first rank's state is for all. PyTorch's part is given it on every rank."""
    model = side.model()
    optimizer = _adamw(model)
    side.train(model, optimizer, 0, 1)
    whole = StateDictOptions(full_state_dict=True)
    state = get_state_dict(model, optimizer, options=whole)
    side.train(model, optimizer, 2)

    other = side.model()
    fresh = _adamw(other)
    given = state if side.is_torch or dist.get_rank() == 0 else ({}, {})
    chosen = whole if side.is_torch else StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, given[0], options=chosen)
    set_optimizer_state_dict(other, fresh, given[1], options=chosen)
    side.train(other, fresh, 2)


@off_plan(of=FLAT)
def flat_loaded_from_rank_0(side: Side) -> None:
    _from_rank_0(side)


@off_plan(of=FLAT_ORIG)
def flat_orig_loaded_from_rank_0(side: Side) -> None:
    _from_rank_0(side)


def _raw_optimizer_state(side: Side) -> None:
    """optimizer.state_dict() itself, saved and loaded."""
    model = side.model()
    optimizer = _adamw(model)
    side.train(model, optimizer, 0, 1)
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=side.folder)
    kept = {name: value.detach().clone() for name, value in enumerate(model.parameters())}
    side.train(model, optimizer, 2)

    other = side.model()
    fresh = _adamw(other)
    side.train(other, fresh, 0)  # so that there is a state
    state = {"optimizer": fresh.state_dict()}
    dcp.load(state, checkpoint_id=side.folder)
    fresh.load_state_dict(state["optimizer"])
    with torch.no_grad():
        for number, parameter in enumerate(other.parameters()):
            parameter.copy_(kept[number])
    side.train(other, fresh, 2)


@off_plan()
def raw_optimizer_state(side: Side) -> None:
    _raw_optimizer_state(side)


@off_plan(of=FLAT, stop=FLAT_SAYS, replan=FLAT_SAYS)
def flat_raw_optimizer_state(side: Side) -> None:
    """FSDP1 saves one rank's part for all and trains on wrongly."""
    _raw_optimizer_state(side)


@off_plan(of=FLAT_ORIG, stop=FLAT_SAYS, replan=FLAT_SAYS)
def flat_orig_raw_optimizer_state(side: Side) -> None:
    _raw_optimizer_state(side)


def _state_seen(side: Side, **options) -> None:
    """Names, shapes and values of what is saved."""
    model = side.model()
    optimizer = _adamw(model)
    side.train(model, optimizer, 0, 1)
    chosen = StateDictOptions(full_state_dict=True, **options)
    for name, value in sorted(get_model_state_dict(model, options=chosen).items()):
        side.see(name, value)
    found = get_optimizer_state_dict(model, optimizer, options=chosen)
    for name, values in sorted(found["state"].items()):
        for key, value in sorted(values.items()):
            side.see(f"{name} {key}", torch.as_tensor(value))


@off_plan()
def whole_state(side: Side) -> None:
    _state_seen(side)


@off_plan(of=FLAT)
def flat_whole_state(side: Side) -> None:
    _state_seen(side)


@off_plan(of=FLAT_ORIG)
def flat_orig_whole_state(side: Side) -> None:
    _state_seen(side)

