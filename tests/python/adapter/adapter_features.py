# SPDX-License-Identifier: Apache-2.0
"""Functions that run on the ranks in test_adapter_features.py: what users do besides a plain loop, next to real
FSDP2."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
from adapter_workers import DEVICE
from equivalence import (
    Case,
    Fsdp2Calls,
    PlanCalls,
    Trainer,
    largest_difference,
    local,
    make_mesh,
    make_model,
    whole,
    with_fsdp2,
    with_plan,
)
from equivalence_models import build, inputs_of, loss_of
from equivalence_settings import END, case, micro

import shardplan.torch as sp

STEPS = 3
DEFAULT = case("features")
SHARDED_ON_1 = case(
    "shard_dims",
    arguments={"width": 8, "hidden": 12},
    fsdp2={"shard_dims": [{"parameters": ["layers.*.up.weight", "layers.*.down.weight"], "dim": 1}]},
)
ADDING = case("adding", program=[[*micro(0), *micro(1), *END]])
PLANS = [DEFAULT, SHARDED_ON_1, ADDING]


def both(plan: str, mesh, of: Case = DEFAULT) -> tuple[nn.Module, nn.Module]:
    return with_plan(of, make_model(of), mesh, plan), with_fsdp2(of, make_model(of), mesh)


def train(of: Case, ours: nn.Module, theirs: nn.Module, steps: int = STEPS) -> tuple[float, str]:
    """Both in lockstep -> the largest difference."""
    trainers = Trainer(of, ours, PlanCalls(ours)), Trainer(of, theirs, Fsdp2Calls(theirs))
    worst = (0.0, "")
    for step in range(steps):
        worst = max(worst, largest_difference(*(trainer.step(step) for trainer in trainers)))
    return worst


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p) for name, p in model.named_parameters()}


def step_in_backward(model: nn.Module) -> None:
    """One SGD per parameter, which steps as soon as its gradient is there and drops it."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters() if p.requires_grad}

    def hook(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(hook)


def optimizer_in_backward(plan: str, mesh) -> tuple[float, str]:
    models = both(plan, mesh)
    for model in models:
        step_in_backward(model)
        for step in range(STEPS):
            args, kwargs = inputs_of("mlp", 10 * step + dist.get_rank())
            loss_of(model(*args, **kwargs)).backward()
            assert all(p.grad is None for p in model.parameters()), "the hook dropped the gradients"
    return largest_difference(*map(parameters_of, models))


def reduction_hook(plan: str, mesh) -> tuple[float, str]:
    ours, theirs = both(plan, mesh)
    sp.set_all_reduce_hook(ours.layers[1], lambda tensor: tensor.mul_(0.5))
    theirs.layers[1].set_all_reduce_hook(lambda tensor: tensor.mul_(0.5))
    return train(DEFAULT, ours, theirs)


class CountingAllGather:
    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class DoublingReduceScatter(CountingAllGather):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls += 1
        dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        output_tensor.mul_(2)


def custom_collectives(plan: str, mesh) -> tuple[float, str]:
    ours, theirs = both(plan, mesh)
    gather, reduce = CountingAllGather(), DoublingReduceScatter()
    sp.set_custom_all_gather(ours.layers[0], gather)
    sp.set_custom_reduce_scatter(ours.layers[2], reduce)
    theirs.layers[0].set_custom_all_gather(CountingAllGather())
    theirs.layers[2].set_custom_reduce_scatter(DoublingReduceScatter())
    difference = train(DEFAULT, ours, theirs)
    assert gather.calls == 2 * STEPS and reduce.calls == STEPS, (gather.calls, reduce.calls)
    return difference


def from_meta(plan: str, mesh) -> tuple[float, str]:
    """Every rank draws other values; those of rank 0 count, unit by unit."""
    with torch.device("meta"):
        model = build("mlp")
    torch.manual_seed(100 + dist.get_rank())

    def initialize(module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.normal_(std=0.1)

    sp.apply(model, plan, mesh, initialize=initialize, broadcast_from_rank_0=True)
    drawn = parameters_of(model)
    torch.manual_seed(100)
    same = build("mlp").to(DEVICE)
    with torch.no_grad():
        for name, parameter in same.named_parameters():
            parameter.copy_(drawn[name])
    assert all(value.std() > 0 for value in drawn.values() if value.numel() > 1)
    return train(DEFAULT, model, with_fsdp2(DEFAULT, same, mesh))


def summon(plan: str, mesh) -> tuple[float, str]:
    ours, theirs = both(plan, mesh)
    train(DEFAULT, ours, theirs, steps=1)
    before = parameters_of(ours)
    with sp.summon_full_params(ours):
        inside = {name: p.detach().clone() for name, p in ours.named_parameters()}
        assert largest_difference(inside, before)[0] == 0.0
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.mul_(1.5)
        try:
            ours(torch.zeros(2, 7))
            raise AssertionError("the model ran inside summon_full_params")
        except RuntimeError as error:
            assert "cannot run inside summon_full_params" in str(error)
    with sp.summon_full_params(ours, writeback=False), torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(1.5)
    return max(largest_difference(parameters_of(ours), parameters_of(theirs)), train(DEFAULT, ours, theirs))


def shard_dims(plan: str, mesh) -> tuple[float, str]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    ours = with_plan(SHARDED_ON_1, make_model(SHARDED_ON_1), mesh, plan)
    theirs = make_model(SHARDED_ON_1)
    on_1 = {p for layer in theirs.layers for p in (layer.up.weight, layer.down.weight)}
    for module in (*theirs.layers, theirs):
        fully_shard(module, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p in on_1 else None)
    assert ours.layers[0].up.weight.placements == theirs.layers[0].up.weight.placements == (Shard(1),)
    difference = train(SHARDED_ON_1, ours, theirs)
    args, _ = inputs_of("mlp", dist.get_rank())
    with torch.no_grad():  # gathered outside the plan
        evaluations = [{"": loss_of(model(*args))} for model in (ours, theirs)]
    return max(difference, largest_difference(*evaluations))


def skipping(model: nn.Module, step: int):
    """From the third step on a layer is left out, from the fifth it runs twice."""
    model.unused = (1,) if 2 <= step < 4 else ()
    model.used_twice = 1 if step >= 4 else None


def deviation_is_replanned(plan: str, mesh) -> tuple[float, str]:
    ours = sp.apply(make_model(DEFAULT), plan, mesh, on_deviation="replan")
    theirs = with_fsdp2(DEFAULT, make_model(DEFAULT), mesh)
    trainers = Trainer(DEFAULT, ours, PlanCalls(ours)), Trainer(DEFAULT, theirs, Fsdp2Calls(theirs))
    worst, warned = (0.0, ""), []
    for step in range(7):
        seen = []
        for trainer in trainers:
            skipping(trainer.model, step)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                seen.append(trainer.step(step))
            warned += [(step, str(w.message)) for w in caught if "the next step is planned again" in str(w.message)]
        worst = max(worst, largest_difference(*seen))
    assert [step for step, _ in warned] == [2, 4], warned
    assert "found pre_forward layers.2, expected pre_forward layers.1 (before step 2, " in warned[0][1], warned
    assert "(before step 4, " in warned[1][1], warned
    return worst


def deviation_stops(plan: str, mesh) -> tuple[float, str]:
    ours, _ = both(plan, mesh)
    loss_of(ours(*inputs_of("mlp", 0)[0])).backward()
    ours(*inputs_of("mlp", 1)[0])
    sp.abandon_step(ours)  # the loop goes on with its next batch
    skipping(ours, 2)
    try:
        ours(*inputs_of("mlp", 2)[0])
    except RuntimeError as error:
        assert "found pre_forward layers.2, expected pre_forward layers.1 (before step 2, " in str(error), error
        return 0.0, ""
    raise AssertionError("a step that deviates ran")


def dropped_gradient(plan: str, mesh) -> tuple[float, str]:
    """zero_grad between two micro-batches whose gradients the plan adds."""
    ours = with_plan(ADDING, make_model(ADDING), mesh, plan)
    try:
        for number in range(2):
            loss_of(ours(*inputs_of("mlp", number)[0])).backward()
            ours.zero_grad()
    except RuntimeError as error:
        assert "found zero_grad() between micro-batches" in str(error), error
        return 0.0, ""
    raise AssertionError("a dropped gradient came back")


def evaluation_between_forward_and_backward(plan: str, mesh) -> tuple[float, str]:
    """Something outside the plan that needs whole parameters in the middle of a step."""
    ours, theirs = both(plan, mesh)
    args, _ = inputs_of("mlp", dist.get_rank())
    losses = []
    for model in (ours, theirs):
        loss = loss_of(model(*args))
        with torch.no_grad():
            losses.append(loss_of(model(*args)))
        loss.backward()
    gradients = [{n: local(p.grad) for n, p in model.named_parameters()} for model in (ours, theirs)]
    return max(largest_difference({"": losses[0]}, {"": losses[1]}), largest_difference(*gradients))


def optimizer_state(plan: str, folder: str, mesh) -> tuple[float, str]:
    """Model and optimizer by torch.distributed.checkpoint into real FSDP2 and back; training goes on the same."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.tensor import DTensor

    ours, theirs = both(plan, mesh)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (ours, theirs)]

    def step(model, optimizer, number):
        args, _ = inputs_of("mlp", 10 * number + dist.get_rank())
        loss_of(model(*args)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def state(model, optimizer):
        parts = get_state_dict(model, optimizer)
        return {"model": parts[0], "optimizer": parts[1]}

    for number in range(2):
        step(ours, optimizers[0], number)
    assert all(isinstance(s["exp_avg"], DTensor) for s in optimizers[0].state.values())
    worst = (0.0, "")
    sources = [(ours, optimizers[0]), (theirs, optimizers[1])]
    for number, (source, target) in enumerate((sources, sources[::-1])):
        dcp.save(state(*source), checkpoint_id=f"{folder}/{number}")
        # The loaded state replaces everything: the target has trained on its own.
        step(*target, 50)
        loaded = state(*target)
        dcp.load(loaded, checkpoint_id=f"{folder}/{number}")
        set_state_dict(*target, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        for following in (60, 61):
            step(*source, following)
            step(*target, following)
        worst = max(worst, largest_difference(parameters_of(source[0]), parameters_of(target[0])))
    return worst


FEATURES = (
    optimizer_in_backward,
    reduction_hook,
    custom_collectives,
    from_meta,
    summon,
    deviation_is_replanned,
    deviation_stops,
    evaluation_between_forward_and_backward,
)


def run_features(plans: dict[str, str], folder: str) -> dict[str, tuple]:
    import traceback

    mesh = make_mesh(DEFAULT)
    results = {}
    calls = {feature.__name__: (feature, (plans["features"], mesh)) for feature in FEATURES}
    calls["shard_dims"] = (shard_dims, (plans["shard_dims"], mesh))
    calls["dropped_gradient"] = (dropped_gradient, (plans["adding"], mesh))
    calls["optimizer_state"] = (optimizer_state, (plans["features"], folder, mesh))
    for name, (feature, arguments) in calls.items():
        try:
            results[name] = feature(*copy.copy(arguments))
        except Exception as error:
            results[name] = (float("inf"), f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    return results
