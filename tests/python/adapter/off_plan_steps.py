# SPDX-License-Identifier: Apache-2.0
"""Cases of off_plan.py: steps that are given up, and plans that are taken off."""

from __future__ import annotations

import torch
import torch.nn as nn
from equivalence import local, whole
from flat_settings import case as flat_case
from off_plan import Side, off_plan

FLAT, FLAT_ORIG = flat_case("flat"), flat_case("flat_orig", use_orig_params=True)


def _abandoned(side: Side, backward: bool) -> None:
    import shardplan.torch as sp

    model = side.model()
    optimizer = side.optimizer(model)
    side.train(model, optimizer, 0)
    if not side.is_torch:  # PyTorch has no way to give up a step; a model that never began it is the measure
        loss = side.loss(model, 7)
        side.seen.popitem()
        if backward:
            loss.backward()
        sp.abandon_step(model)
        assert all(parameter.grad is None for parameter in model.parameters())
    side.train(model, optimizer, 1, 2)


@off_plan()
def abandoned_after_the_forward(side: Side) -> None:
    _abandoned(side, backward=False)


@off_plan()
def abandoned_after_the_backward(side: Side) -> None:
    _abandoned(side, backward=True)


@off_plan(of=FLAT_ORIG)
def flat_abandoned_after_the_forward(side: Side) -> None:
    _abandoned(side, backward=False)


def _whole_parameters(side: Side, model: nn.Module) -> dict[str, torch.Tensor]:
    if not side.is_flat or not side.is_torch:
        return {name: whole(parameter).clone() for name, parameter in model.named_parameters()}
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in model.named_parameters()}


def _removed(side: Side) -> None:
    """The module is what it was, with other values, and takes a plan again."""
    import shardplan.torch as sp

    model = side.model()
    side.train(model, side.optimizer(model), 0, 1)
    if not side.is_torch:
        classes = {name: type(module) for name, module in model.named_modules()}
        side.loss(model, 5)  # a step under way is given up
        side.seen.popitem()
        assert sp.remove(model) is model
        assert {name: type(module) for name, module in model.named_modules()} == classes
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert not any(name.startswith("_shardplan") for module in model.modules() for name in vars(module))
    for name, parameter in sorted(_whole_parameters(side, model).items()):
        side.see(name, parameter)
    if side.is_torch:
        side.train(model, side.optimizer(model), 2, 3)
        return
    sp.apply(model, side.plan, side.mesh, on_deviation=side.kind)
    side.train(model, side.optimizer(model), 2, 3)
    assert all(local(parameter).numel() >= 0 for parameter in model.parameters())


@off_plan()
def removed(side: Side) -> None:
    _removed(side)


@off_plan(of=FLAT)
def flat_removed(side: Side) -> None:
    _removed(side)


@off_plan(of=FLAT_ORIG)
def flat_orig_removed(side: Side) -> None:
    _removed(side)
