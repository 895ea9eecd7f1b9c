# SPDX-License-Identifier: Apache-2.0
"""Functions that run on the ranks in test_adapter_flat_user.py: what a user does to a flat model between steps, next to
real FSDP1."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from adapter_workers import DEVICE
from equivalence import Case, largest_difference, make_mesh, make_model, whole
from equivalence_models import inputs_of, loss_of
from flat_equivalence import (
    Fsdp1Calls,
    FlatTrainer,
    PlanCalls,
    as_on_a_gpu,
    clean,
    give_optimizers,
    steps_in_backward,
    whole_parameters,
    with_fsdp1,
)
from torch.utils._pytree import tree_map_only

Models = tuple[nn.Module, nn.Module]  # by the plan, FSDP1


def models_of(case: Case, plan: str) -> Models:
    import shardplan.torch as sp

    mesh = make_mesh(case)
    return sp.apply(make_model(case), plan, mesh), with_fsdp1(case, make_model(case), mesh)


def loss(case: Case, model: nn.Module, number: int) -> torch.Tensor:
    made = inputs_of(case.model, 100 * number + dist.get_rank())
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(DEVICE), made)
    return loss_of(model(*args, **kwargs))


def train(case: Case, model: nn.Module, steps: int, first: int = 0) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for number in range(first, first + steps):
        loss(case, model, number).backward()
        optimizer.step()
        optimizer.zero_grad()


def parameter(model: nn.Module, name: str) -> nn.Parameter:
    return next(p for found, p in model.named_parameters() if clean(found) == name)


def holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return next(m for found, m in model.named_modules() if clean(found) == path and leaf in m._parameters), leaf


def replace_data(model: nn.Module) -> None:
    for name in ("layers.1.up.weight", "head.bias"):
        slice_ = parameter(model, name)
        slice_.data = torch.full_like(slice_, 0.25)


def replace_parameter(model: nn.Module) -> None:
    for name in ("layers.1.up.weight", "head.bias"):
        module, leaf = holder(model, name)
        setattr(module, leaf, nn.Parameter(torch.full_like(module._parameters[leaf], 0.125)))


def change_summoned(model: nn.Module) -> None:
    import shardplan.torch as sp
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    summon = FSDP.summon_full_params if isinstance(model, FSDP) else sp.summon_full_params
    with summon(model), torch.no_grad():
        for _, p in model.named_parameters():
            p.mul_(0.5)


def _same_after(change: Callable[[nn.Module], None], case: Case, plan: str) -> tuple[float, str]:
    """Both train, are changed, and train on."""
    both = models_of(case, plan)
    for model in both:
        train(case, model, 2)
        change(model)
        train(case, model, 2, first=2)
    return largest_difference(*map(whole_parameters, both))


def replaced_data(case: Case, plan: str) -> tuple[float, str]:
    return _same_after(replace_data, case, plan)


def replaced_parameter(case: Case, plan: str) -> tuple[float, str]:
    return _same_after(replace_parameter, case, plan)


def changed_summoned(case: Case, plan: str) -> tuple[float, str]:
    return _same_after(change_summoned, case, plan)


def replaced_by_another_shape(case: Case, plan: str) -> list[str]:
    """The messages of both. Both ranks hold a part of the parameter."""
    said = []
    for model in models_of(case, plan):
        train(case, model, 1)
        slice_ = parameter(model, "layers.1.up.bias")
        slice_.data = torch.zeros(slice_.numel() + 1)
        try:
            loss(case, model, 1)
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    return said


def state_dicts(case: Case, plan: str) -> dict[str, bool]:
    """state_dict equals FSDP1's, whole and sharded; a fresh model loads both."""
    import shardplan.torch as sp

    ours, theirs = models_of(case, plan)
    for model in (ours, theirs):
        train(case, model, 2)
    full, expected = ours.state_dict(), {clean(k): v for k, v in theirs.state_dict().items()}
    results = {"full": largest_difference(dict(full), expected)[0] == 0.0}
    with sp.state_dict_type(ours, "sharded"):
        sharded = ours.state_dict()
    results["sharded"] = largest_difference({k: whole(v) for k, v in sharded.items()}, expected)[0] == 0.0
    for name, state in (("load full", full), ("load sharded", sharded)):
        other = models_of(case, plan)[0]
        other.load_state_dict(state)
        results[name] = largest_difference(dict(other.state_dict()), expected)[0] == 0.0
    return results


def evaluation(case: Case, plan: str) -> dict[str, bool]:
    """A forward without gradients between steps sees the parameters and disturbs nothing."""
    ours, _ = models_of(case, plan)
    train(case, ours, 2)
    alone = make_model(case)
    alone.load_state_dict(ours.state_dict())
    with torch.no_grad():
        same = torch.equal(loss(case, ours, 50), loss(case, alone, 50))
    train(case, ours, 2, first=2)
    undisturbed, _ = models_of(case, plan)
    train(case, undisturbed, 4)
    return {"sees": same, "disturbs nothing": largest_difference(*map(whole_parameters, (ours, undisturbed)))[0] == 0.0}


def evaluated_before_step(case: Case, plan: str) -> tuple[float, str]:
    """A forward that is not in the plan, between the backward and the step: it sees the parameters of before the step,
    whether or not the loop waits for the device."""
    import shardplan.torch as sp

    mesh = make_mesh(case)
    seen = []
    for synchronizes in (True, False):
        model = sp.apply(make_model(case), plan, mesh)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        evaluated = {}
        for number in range(3):
            loss(case, model, number).backward()
            with torch.no_grad():
                evaluated[f"evaluation {number}"] = loss(case, model, 50 + number)
            if synchronizes and DEVICE == "cuda":
                torch.cuda.synchronize()
            optimizer.step()
            optimizer.zero_grad()
        seen.append({**evaluated, **whole_parameters(model)})
    return largest_difference(*seen)


def parameters_shown(case: Case, plan: str) -> bool:
    """The same names, shapes and values as FSDP1 shows."""
    shown = [
        {clean(name): p.detach().clone() for name, p in model.named_parameters()} for model in models_of(case, plan)
    ]
    return largest_difference(*shown)[0] == 0.0


def gradients_summoned(case: Case, plan: str) -> tuple[float, str]:
    """Whole gradients, changed, and what the optimizer makes of them."""
    import shardplan.torch as sp
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    both, seen = models_of(case, plan), []
    for model in both:
        train(case, model, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss(case, model, 7).backward()
        summon = FSDP.summon_full_params if isinstance(model, FSDP) else sp.summon_full_params
        with summon(model, with_grads=True), torch.no_grad():
            seen.append({clean(name): p.grad.clone() for name, p in model.named_parameters()})
            for p in model.parameters():
                p.grad.mul_(0.5)
        optimizer.step()
    return max(largest_difference(*seen), largest_difference(*map(whole_parameters, both)))


def summoned_on_rank_0(case: Case, plan: str) -> tuple[float, str]:
    """Parameters that each rank sees inside; training goes on undisturbed."""
    import shardplan.torch as sp
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    both, seen = models_of(case, plan), []
    for model in both:
        train(case, model, 1)
        summon = FSDP.summon_full_params if isinstance(model, FSDP) else sp.summon_full_params
        with summon(model, writeback=False, rank0_only=True):
            seen.append({clean(name): p.detach().clone() for name, p in model.named_parameters()})
        train(case, model, 2, first=1)
    return max(largest_difference(*seen), largest_difference(*map(whole_parameters, both)))


def summoned_on_the_host(case: Case, plan: str) -> tuple[float, str]:
    """FSDP1 frees on the CPU what is on the CPU already: it summons where it is."""
    import shardplan.torch as sp
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    both = models_of(case, plan)
    for model in both:
        train(case, model, 1)
        summon = FSDP.summon_full_params(model)
        if not isinstance(model, FSDP):
            summon = sp.summon_full_params(model, offload_to_cpu=True)
        with summon, torch.no_grad():
            for p in model.parameters():
                assert isinstance(model, FSDP) or p.device.type == "cpu"
                p.mul_(0.5)
        train(case, model, 2, first=1)
    return largest_difference(*map(whole_parameters, both))


def deviating(case: Case, plan: str) -> tuple[float, str]:
    """Other parts of the model run from some step on: it is finished without the plan, the next one is planned
    again."""
    import shardplan.torch as sp

    mesh = make_mesh(case)
    prepare = give_optimizers if steps_in_backward(case) else lambda model: model
    ours = sp.apply(prepare(make_model(case)), plan, mesh, on_deviation="replan")
    theirs = with_fsdp1(case, prepare(make_model(case)), mesh)
    trainers = [FlatTrainer(case, m, calls(m), None) for m, calls in ((ours, PlanCalls), (theirs, Fsdp1Calls))]
    worst, warned = (0.0, ""), []
    for step in range(7):
        seen = []
        for trainer in trainers:
            mlp = getattr(trainer.model, "module", trainer.model)
            mlp.unused, mlp.used_twice = (1,) if 2 <= step < 4 else (), 1 if step >= 4 else None
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                seen.append(trainer.step(step))
            warned += [(step, str(w.message)) for w in caught if "the next step is planned again" in str(w.message)]
        worst = max(worst, largest_difference(*seen))
    assert [step for step, _ in warned] == [2, 4], warned
    return max(worst, largest_difference(*map(whole_parameters, (ours, theirs))))


SCENARIOS = {
    f.__name__: f
    for f in (
        replaced_data,
        replaced_parameter,
        changed_summoned,
        replaced_by_another_shape,
        state_dicts,
        evaluation,
        evaluated_before_step,
        parameters_shown,
        gradients_summoned,
        summoned_on_rank_0,
        summoned_on_the_host,
        deviating,
    )
}


def run_all(runs: list[tuple[str, Case]], plans: dict[str, str]) -> dict[tuple[str, str], object]:
    """(scenario, case name) -> its result, or the message of what it raised."""
    import traceback

    results: dict[tuple[str, str], object] = {}
    for scenario, case in runs:
        try:
            with as_on_a_gpu():
                results[scenario, case.name] = SCENARIOS[scenario](case, plans[case.name])
        except Exception:
            results[scenario, case.name] = traceback.format_exc()
    return results
