# SPDX-License-Identifier: Apache-2.0
"""Errors of the adapter when plan, model, ranks or a rank's life are not as planned; and actions that work between
steps."""

import os
import pathlib

import adapter_errors as scenarios
import pytest
from adapter_workers import run_on_ranks
from conftest import build_folder
from rank_runs import HSDP, make_plan
from test_adapter import plans  # noqa: F401  (a fixture)


@pytest.fixture(scope="module")
def plan(plans) -> str:  # noqa: F811
    return plans.plan("default", 2)


def returned(outcomes: list) -> list:
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None and outcome[0] == "returned", f"rank {rank}: {outcome}"
    return [outcome[1] for outcome in outcomes]


@pytest.fixture(scope="module")
def refusals(plan, tmp_path_factory) -> dict[str, str]:
    return returned(run_on_ranks(2, tmp_path_factory.mktemp("ranks"), scenarios.apply_to_all_changed, plan))[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("wider", "parameter blocks.1.up.weight of blocks.1: shape expected [177, 44], found [178, 44]"),
        ("untied", "tied names expected ['head.weight'], found none"),
        ("frozen", "parameter blocks.0.norm1.weight of blocks.0: requires_grad expected True, found False"),
        ("half", "parameter norm.weight of the root: dtype expected float32, found bfloat16"),
        ("extra", "parameter blocks.2.extra: in the model, in no unit of the plan"),
        ("shorter", "parameter blocks.2.norm1.weight of blocks.2: expected by the plan, not in the model"),
    ],
)
def test_plan_for_another_model_names_the_parameter(refusals, change, says):
    assert says in refusals[change]
    assert "the plan was made for another model" in refusals[change]


def test_world_size_that_differs(plan, tmp_path):
    outcomes = run_on_ranks(3, tmp_path, scenarios.apply_only, "default", plan)
    for outcome in outcomes:
        assert outcome[0] == "raised"
        assert "PlanError: the plan is for a world size of 2 (shard 2), found 3 ranks" in outcome[1]


def test_truncated_plan_says_file_and_place(plan, tmp_path):
    truncated = tmp_path / "truncated.json"
    text = pathlib.Path(plan).read_text()
    truncated.write_text(text[: len(text) // 2])
    import shardplan.torch as sp

    with pytest.raises(sp.PlanError, match="truncated.json") as error:
        sp.load_plan(truncated)
    assert "line" in str(error.value) or "end" in str(error.value)
    with pytest.raises(sp.PlanError, match="missing.json"):
        sp.load_plan(tmp_path / "missing.json")


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "soon", [1], 1e12])
def test_what_is_no_time_to_wait_is_refused(plan, timeout):
    import shardplan.torch as sp
    import torch

    with pytest.raises(ValueError, match="timeout is a number of seconds above 0"):
        sp.apply(torch.nn.Linear(1, 1), plan, timeout=timeout)


def test_another_order_names_the_first_trigger_that_differs(plan, tmp_path):
    for said in returned(run_on_ranks(2, tmp_path, scenarios.skip_a_block, plan)):
        assert "the model deviates from the plan" in said
        assert "found pre_forward blocks.2, expected pre_forward blocks.1" in said


def test_missing_gradient_names_the_parameter(plan, tmp_path):
    for said in returned(run_on_ranks(2, tmp_path, scenarios.unused_parameter, plan)):
        assert "blocks.1" in said and "got no gradient" in said


def test_killed_rank_stops_the_others_and_is_named(plan, tmp_path):
    survivor, killed = run_on_ranks(2, tmp_path, scenarios.die_in_second_step, plan, timeout_s=10)
    assert killed is None
    said, seconds = survivor[1]
    assert seconds < 40
    assert "rank 1" in said and ("all_gather" in said or "reduce_scatter" in said), said
    # On a GPU the host may be a step ahead of what fails.
    assert "backward" in said or os.environ.get("SHARDPLAN_TEST_DEVICE") == "cuda", said


def test_stopped_rank_stops_the_others_within_the_timeout_of_apply(tmp_path):
    """The default group and the groups of the mesh have 1,800 s, and the rank serves the store."""
    stops = 0
    plan = str(make_plan(build_folder() / "bin" / "shardplan", tmp_path, 4, HSDP))
    outcomes = run_on_ranks(
        *(4, tmp_path / "ranks", scenarios.stop_in_third_step, plan, 6.0, stops), timeout_s=1800, stops=stops
    )
    assert outcomes.pop(stops) is None
    for said, seconds in returned(outcomes):
        assert f"rank {stops} did not arrive: it is stopped" in said, said
        assert seconds < 60


def test_evaluation_between_steps(plans, tmp_path):  # noqa: F811
    for same, undisturbed in returned(
        run_on_ranks(2, tmp_path, scenarios.evaluate_between_steps, plans.plan("adamw", 2))
    ):
        assert same, "the validation loss is not the whole model's"
        assert undisturbed, "training went on differently"


def test_checkpoint_loads_into_a_plan_and_into_fsdp2(plans, tmp_path):  # noqa: F811
    arguments = plans.plan("adamw", 2), str(tmp_path / "checkpoint")
    for results in returned(run_on_ranks(2, tmp_path, scenarios.save_and_load, *arguments)):
        assert results == {"shardplan": True, "fsdp2": True}
