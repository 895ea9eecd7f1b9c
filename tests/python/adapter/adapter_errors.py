# SPDX-License-Identifier: Apache-2.0
"""Functions that run on the ranks in test_adapter_errors.py."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from adapter_cases import CASES, ROOT, STEPS, batch_of, gpt, make_model, make_optimizer, part, train, whole, with_plan
from adapter_workers import DEVICE

sys.path.append(str(ROOT / "tests" / "python" / "ranks"))


def apply_only(case: str, plan: str) -> None:
    with_plan(make_model(CASES[case]), plan)


def apply_to_changed_model(plan: str, change) -> str:
    """The message of apply when the default case's model is changed first."""
    import shardplan.torch as sp

    model = make_model(CASES["default"])
    change(model)
    try:
        sp.apply(model.to(DEVICE), plan)
    except sp.PlanError as error:
        return str(error)
    return "applied"


def wider(model) -> None:
    model.blocks[1].up = torch.nn.Linear(44, 178)


def untied(model) -> None:
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())


def frozen(model) -> None:
    model.blocks[0].norm1.weight.requires_grad_(False)


def half(model) -> None:
    model.norm.to(torch.bfloat16)


def extra(model) -> None:
    model.blocks[2].extra = torch.nn.Parameter(torch.zeros(3))


def shorter(model) -> None:
    del model.blocks[2]


CHANGES = {f.__name__: f for f in (wider, untied, frozen, half, extra, shorter)}


def apply_to_all_changed(plan: str) -> dict[str, str]:
    return {name: apply_to_changed_model(plan, change) for name, change in CHANGES.items()}


def skip_a_block(plan: str) -> str:
    """A forward in another order than the plan's."""
    model = with_plan(make_model(CASES["default"]), plan)
    ids, _ = batch_of(CASES["default"], 0, dist.get_rank())
    blocks = list(model.blocks)

    def forward(ids):
        x = model.tokens(ids) + model.positions(torch.arange(ids.shape[1], device=ids.device))
        return model.head(model.norm(blocks[2](blocks[0](x))))

    model.forward = forward
    try:
        model(ids)
    except RuntimeError as error:
        return str(error)
    return "ran"


def unused_parameter(plan: str) -> str:
    """A parameter that the plan reduces gets no gradient."""
    model = with_plan(make_model(CASES["default"]), plan)
    ids, targets = batch_of(CASES["default"], 0, dist.get_rank())
    block = model.blocks[1]
    block.forward = lambda x: x + block.attention(block.norm1(x))
    try:
        gpt.loss_fn(model(ids), targets).backward()
    except RuntimeError as error:
        return str(error)
    return "ran"


def die_in_second_step(plan: str) -> tuple[str, float]:
    """Rank 1 is killed between its forward and backward; what the others say, and after how many seconds."""
    case = CASES["default"]
    model = with_plan(make_model(case), plan)
    optimizer = make_optimizer(case, model)
    start = time.monotonic()
    try:
        for step in range(STEPS):
            ids, targets = batch_of(case, step, dist.get_rank())
            loss = gpt.loss_fn(model(ids), targets)
            if step == 1 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            start = time.monotonic()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "ran", 0.0


def stop_in_third_step(plan: str, timeout_s: float, stops: int) -> tuple[str, float]:
    """That rank is stopped; what the others say, and after how many seconds."""
    import rank_training

    last = time.monotonic()

    def say(text: str) -> None:
        nonlocal last
        if "step 2" in text and dist.get_rank() == stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        last = time.monotonic()

    try:
        rank_training.train(plan, timeout_s, STEPS + 2, say)
    except RuntimeError as error:
        return str(error), time.monotonic() - last
    return "ran", 0.0


def evaluate_between_steps(plan: str) -> tuple[bool, bool]:
    """(validation loss equals the whole model's, training is not disturbed by it)."""
    case = CASES["adamw"]
    ids, targets = batch_of(case, 99, dist.get_rank())
    undisturbed = train(case, with_plan(make_model(case), plan))

    model = with_plan(make_model(case), plan)
    same = True
    optimizer = make_optimizer(case, model)
    for step in range(STEPS):
        loss = gpt.loss_fn(model(batch_of(case, step, dist.get_rank())[0]), batch_of(case, step, dist.get_rank())[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            validation = gpt.loss_fn(model(ids), targets)
        copy = make_model(case).to(ids.device)
        copy.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
        same &= torch.equal(validation, gpt.loss_fn(copy(ids), targets).detach())
    parameters = dict(part(name, p) for name, p in model.named_parameters())
    return same, all(torch.equal(parameters[name], value) for name, value in undisturbed.parameters.items())


def save_and_load(plan: str, folder: str) -> dict[str, bool]:
    """A checkpoint by torch.distributed.checkpoint into a fresh model, and into real FSDP2."""
    import torch.distributed.checkpoint as dcp
    from adapter_cases import with_fsdp2

    case = CASES["adamw"]
    model = with_plan(make_model(case), plan)
    train(case, model, steps=2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    expected = {name: whole(value) for name, value in model.state_dict().items()}
    results = {}
    for kind, wrap in (("shardplan", lambda m: with_plan(m, plan)), ("fsdp2", lambda m: with_fsdp2(case, m))):
        torch.manual_seed(1)
        other = wrap(gpt.Gpt(case.config))
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state["model"])
        loaded = {name: whole(value) for name, value in other.state_dict().items()}
        results[kind] = loaded.keys() == expected.keys() and all(
            torch.equal(loaded[name], value) for name, value in expected.items()
        )
    return results
