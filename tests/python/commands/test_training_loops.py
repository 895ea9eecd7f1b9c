# SPDX-License-Identifier: Apache-2.0
"""Training loops that a strategy describes: wrong ones are bad input, with the place; none is called a bug of
shardplan."""

import itertools
import json
import random

import pytest
from conftest import ROOT

TRACE = ROOT / "tests" / "planner" / "goldens" / "traces" / "small.json"
STEP, ZERO = {"call": "optimizer_step"}, {"call": "zero_grad"}


def forward(microbatch=0):
    return {"call": "forward", "microbatch": microbatch}


def backward(*microbatches):
    return {"call": "backward", "microbatches": list(microbatches) or [0]}


def strategy(folder, policy, *steps):
    path = folder / "strategy.json"
    units = [{"modules": ["layers.*"]}, {"modules": [""]}]
    path.write_text(
        json.dumps({"schema": "shardplan.strategy/1", "policy": policy, "units": units, "program": list(steps)})
    )
    return path


def planned(shardplan, folder, path):
    return shardplan("plan", TRACE, "--strategy", path, "--ranks", "2", "-q", "-o", folder / "plan.json")


WRONG = [
    ([[backward(), forward(), STEP, ZERO]], "/program/0/0/microbatches/0", "found 0, expected a forward of it before"),
    ([[forward(0), backward(0), backward(1), STEP, ZERO]], "/program/0/2/microbatches/0", "found 1"),
    (
        [[forward(), backward(), STEP, ZERO], [forward(0), backward(0, 3), STEP, ZERO]],
        "/program/1/1/microbatches/1",
        "found 3",
    ),
    ([[forward(), backward(0, 0), STEP, ZERO]], "/program/0/1/microbatches/1", "covers a micro-batch once"),
]


@pytest.mark.parametrize("policy", ("fsdp2", "fsdp1"))
@pytest.mark.parametrize(("steps", "pointer", "says"), WRONG)
def test_validate_refuses_what_plan_refuses_with_the_place(shardplan, tmp_path, policy, steps, pointer, says):
    path = strategy(tmp_path, policy, *steps)
    for result in (shardplan("validate", path), planned(shardplan, tmp_path, path)):
        assert result.returncode == 3 and pointer in result.stderr and says in result.stderr, result.stderr


@pytest.mark.parametrize("policy", ("fsdp2", "fsdp1"))
def test_gradients_that_nobody_zeroes_are_carried(shardplan, tmp_path, policy):
    result = planned(shardplan, tmp_path, strategy(tmp_path, policy, [forward(), backward(), STEP]))
    assert result.returncode == 0 and "does not zero the gradients" in result.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert {fault["fault"] for fault in plan["known_faults"]} == {f"{policy}_gradients_grow"}
    assert shardplan("simulate", tmp_path / "plan.json").returncode == 0


def test_no_loop_of_a_user_is_a_bug(shardplan, tmp_path):
    """All short loops in a random order."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    calls = (forward(), backward(), STEP, ZERO, forward(1), backward(1))
    loops = [list(loop) for size in (1, 2, 3, 4) for loop in itertools.product(calls, repeat=size)]
    for loop in random.Random(seed).sample(loops, 60):
        for policy in ("fsdp2", "fsdp1"):
            path = strategy(tmp_path, policy, loop)
            code = planned(shardplan, tmp_path, path).returncode
            assert code in (0, 3), f"seed {seed}, {policy}: {loop}"
            if code == 0:
                assert shardplan("simulate", tmp_path / "plan.json").returncode == 0, f"seed {seed}, {policy}: {loop}"
                assert shardplan("memory", tmp_path / "plan.json").returncode == 0, f"seed {seed}, {policy}: {loop}"
