# SPDX-License-Identifier: Apache-2.0
"""Functions that run on the ranks in test_adapter_changes.py: parameters that a user changes after a plan was applied,
next to real FSDP2. Each function returns the largest difference and what it is of."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from adapter_features import ADDING, DEFAULT, STEPS, both, parameters_of, train
from adapter_workers import DEVICE
from equivalence import Case, inputs_of, largest_difference, local, loss_of, make_mesh

Difference = tuple[float, str]


def _after(change: Callable[[nn.Module], None], plan: str, mesh) -> Difference:
    """Both train, are changed alike, and train on with new optimizers."""
    models = both(plan, mesh)
    worst = train(DEFAULT, *models, steps=2)
    for model in models:
        change(model)
    return max(worst, train(DEFAULT, *models), largest_difference(*map(parameters_of, models)))


def moved(plan: str, mesh) -> Difference:
    """Module.to swaps what is in every parameter."""
    return _after(lambda model: model.to(DEVICE), plan, mesh)


def moved_before_the_first_step(plan: str, mesh) -> Difference:
    models = both(plan, mesh)
    for model in models:
        model.to(DEVICE)
    return train(DEFAULT, *models)


def scaled_copies(model: nn.Module) -> None:
    model._apply(lambda tensor: tensor * 0.5)


def made_anew(plan: str, mesh) -> Difference:
    """Module._apply with a function that gives other tensors."""
    return _after(scaled_copies, plan, mesh)


def loaded_by_assignment(plan: str, mesh) -> Difference:
    def load(model: nn.Module) -> None:
        state = {name: value.clone().mul_(0.75) for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)

    return _after(load, plan, mesh)


def data_assigned(plan: str, mesh) -> Difference:
    def assign(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.detach().clone().mul_(0.5)

    return _after(assign, plan, mesh)


def changed_in_place(plan: str, mesh) -> Difference:
    def scale(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
                local(parameter).add_(0.125)

    return _after(scale, plan, mesh)


def evaluate(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        loss = loss_of(model(*inputs_of("mlp", dist.get_rank())[0]))
    if hasattr(model, "reshard"):  # FSDP2 leaves its root whole
        model.reshard()
    return loss


def evaluated_after_loading(plan: str, mesh) -> Difference:
    """A forward outside the plan sees what was assigned."""
    models = both(plan, mesh)
    train(DEFAULT, *models, steps=1)
    losses = []
    for model in models:
        scaled_copies(model)
        losses.append({"loss": evaluate(model)})
    return max(largest_difference(*losses), train(DEFAULT, *models))


def _says(expected: str, change: Callable[[nn.Module], None], plan: str, mesh) -> Difference:
    """The next step refuses what the plan was not made for, before anything is communicated."""
    ours, theirs = both(plan, mesh)
    train(DEFAULT, ours, theirs, steps=1)
    change(ours)
    try:
        ours(*inputs_of("mlp", dist.get_rank())[0])
    except RuntimeError as error:
        return (0.0, "") if expected in str(error) else (float("inf"), str(error))
    return float("inf"), "nothing was said"


def half_is_refused(plan: str, mesh) -> Difference:
    said = (
        "parameter stem.weight was changed after shardplan.torch.apply: dtype expected torch.float32, found "
        "torch.bfloat16"
    )
    return _says(said, lambda model: model.to(torch.bfloat16), plan, mesh)


def frozen_is_refused(plan: str, mesh) -> Difference:
    said = "parameter layers.1.up.weight: requires_grad expected true, found false"
    return _says(said, lambda model: model.layers[1].up.weight.requires_grad_(False), plan, mesh)


def plain_parameter_is_refused(plan: str, mesh) -> Difference:
    def replace(model: nn.Module) -> None:
        model.layers[2].down.bias = nn.Parameter(torch.zeros(10))

    return _says("parameter layers.2.down.bias was replaced by a Parameter: expected a DTensor", replace, plan, mesh)


def frozen_for_an_evaluation(plan: str, mesh) -> Difference:
    """A change that is undone before the next step concerns nobody."""
    models = both(plan, mesh)
    train(DEFAULT, *models, steps=1)
    for model in models:
        model.requires_grad_(False)
        evaluate(model)
        model.requires_grad_(True)
    return train(DEFAULT, *models)


def in_an_arena(case: Case, plan: str, mesh) -> Difference:
    """All buffers at addresses of their own; an evaluation in the middle of a step takes what is free."""
    import shardplan.torch as sp
    from equivalence import Fsdp2Calls, PlanCalls, Trainer, make_model, with_fsdp2

    ours = sp.apply(make_model(case), plan, mesh, memory="arena")
    theirs = with_fsdp2(case, make_model(case), mesh)
    trainers = Trainer(case, ours, PlanCalls(ours)), Trainer(case, theirs, Fsdp2Calls(theirs))
    worst = (0.0, "")
    for step in range(STEPS):
        worst = max(worst, largest_difference(*(trainer.step(step) for trainer in trainers)))
    losses = []
    for model in (ours, theirs):
        args, _ = inputs_of("mlp", dist.get_rank())
        loss = loss_of(model(*args))
        with torch.no_grad():
            losses.append({"inside": loss_of(model(*args))})
        loss.backward()
    gradients = [{n: local(p.grad) for n, p in model.named_parameters()} for model in (ours, theirs)]
    return max(worst, largest_difference(*losses), largest_difference(*gradients))


CHANGES = (
    moved,
    moved_before_the_first_step,
    made_anew,
    loaded_by_assignment,
    data_assigned,
    changed_in_place,
    evaluated_after_loading,
    half_is_refused,
    frozen_is_refused,
    plain_parameter_is_refused,
    frozen_for_an_evaluation,
)
IN_AN_ARENA = (DEFAULT, ADDING)


def run_changes(plans: dict[str, str]) -> dict[str, Difference]:
    mesh = make_mesh(DEFAULT)
    calls = {change.__name__: (change, (plans[DEFAULT.name], mesh)) for change in CHANGES}
    calls |= {f"arena {case.name}": (in_an_arena, (case, plans[case.name], mesh)) for case in IN_AN_ARENA}
    results = {}
    for name, (function, arguments) in calls.items():
        try:
            results[name] = function(*arguments)
        except Exception as error:
            results[name] = (float("inf"), f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    return results
