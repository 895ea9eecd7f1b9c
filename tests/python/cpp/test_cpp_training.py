# SPDX-License-Identifier: Apache-2.0
"""A LibTorch model in C++ trains by a plan as the same model in Python does: losses, norms and checkpoints bit for
bit."""

import pytest
from cpp_training import Plans, in_cpp, in_python


@pytest.fixture(scope="session")
def plans(tmp_path_factory, shardplan):
    return Plans(tmp_path_factory.mktemp("plans"), shardplan)


def same(ours, theirs) -> None:
    assert ours.codes == [0] * len(ours.codes), ours.errors
    assert theirs.codes == [0] * len(theirs.codes), theirs.errors
    assert ours.lines == theirs.lines
    assert len(ours.lines[0]) > 2


SETTINGS = {
    "adamw": (2, (), {}),
    "three ranks": (3, (), {"steps": 2}),
    "one rank": (1, (), {}),
    "sgd": (2, ("--optimizer", "sgd"), {"optimizer": "sgd"}),
    "momentum": (2, ("--optimizer", "sgdm"), {"optimizer": "momentum"}),
    "adam": (2, ("--optimizer", "adam"), {"optimizer": "adam"}),
    "clipped": (2, (), {"clip": 0.1}),
    "bfloat16": (2, ("--param-dtype", "bfloat16", "--reduce-dtype", "float32"), {}),
    "kept after the forward": (2, ("--reshard-after-forward", "false"), {}),
    "evaluated": (2, (), {"evaluate": "yes"}),
    "scaled": (2, (), {"scaler": "yes"}),
    "micro-batches": (2, ("--accumulate", "2"), {"microbatches": 2, "rows": 1}),
    "micro-batches reduced once": (
        2,
        ("--accumulate", "2", "--no-sync"),
        {"microbatches": 2, "rows": 1, "no_sync": "yes"},
    ),
    "micro-batches in bfloat16 reduced once": (
        2,
        ("--accumulate", "2", "--no-sync", "--param-dtype", "bfloat16", "--reduce-dtype", "float32"),
        {"microbatches": 2, "rows": 1, "no_sync": "yes"},
    ),
    "replicas": (4, ("--mesh", "replicate=2", "shard=2"), {"steps": 2}),
    "offloaded": (2, ("--cpu-offload",), {}),
    "prefetched": (2, ("--forward-prefetch", "2", "--backward-prefetch", "2"), {}),
    "resharded to two": (4, ("--reshard-after-forward", "2"), {"steps": 2}),
    "step() called directly": (2, (), {"step": "direct"}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_trains_as_in_python(plans, name):
    ranks, flags, settings = SETTINGS[name]
    plan = plans.plan(ranks, *flags)
    same(in_cpp(ranks, plan=plan, **settings), in_python(ranks, plan=plan, **settings))


def test_a_model_that_does_not_fit_names_the_parameter(plans):
    done = in_cpp(2, plan=plans.plan(2), width=40)
    assert done.codes == [4, 4]
    for said in done.errors:
        assert (
            "parameter wte.weight of the root: shape expected" in said and "Trace this model and plan it again" in said
        )


def test_a_plan_for_other_ranks_and_a_flat_one_are_refused(plans):
    done = in_cpp(2, plan=plans.plan(3))
    assert done.codes == [4, 4] and all(
        "/world_size: the plan is for another number of ranks (found 3, expected 2)" in said for said in done.errors
    )
    done = in_cpp(2, plan=plans.plan(2, policy="fsdp1"))
    assert done.codes == [4, 4] and all(
        "modules in C++ cannot hold views of a flat parameter" in said for said in done.errors
    )


def test_a_rank_that_dies_is_named_by_the_other(plans):
    done = in_cpp(2, plan=plans.plan(2), steps=20, die_in_step=2, dies=1)
    assert done.codes == [7, -6]
    assert "rank 1" in done.errors[0] and "died" in done.errors[0]


def test_another_micro_batch_stops_or_is_trained_on_demand(plans):
    plan = plans.plan(2)
    stopped = in_cpp(2, plan=plan, extra_microbatch_in_step=1)
    assert stopped.codes == [7, 7] and all(
        "the model deviates from the plan" in said and "OnDeviation::kOnDemand" in said for said in stopped.errors
    )
    for step in ("training", "direct"):
        went_on = in_cpp(2, plan=plan, extra_microbatch_in_step=1, steps=4, deviation="on_demand", step=step)
        assert went_on.codes == [0, 0], went_on.errors
        losses = [line for line in went_on.lines[0] if line.startswith("step")]
        assert len(losses) == 4 and losses[1].count("loss") == 2


def test_a_step_that_is_abandoned_leaves_no_trace(plans):
    plan = plans.plan(2)
    assert in_cpp(2, plan=plan, interrupt="yes").lines == in_cpp(2, plan=plan).lines


@pytest.mark.parametrize("background", ["no", "yes"])
def test_goes_on_at_another_number_of_ranks(plans, tmp_path, background):
    """Rows of a step are the same, so losses are nearly the same: sums over ranks round in another order."""
    at = tmp_path / "saved"
    saved = in_cpp(2, plan=plans.plan(2), rows=3, steps=2, save=at, background=background)
    assert saved.codes == [0, 0], saved.errors
    resumed = in_cpp(3, plan=plans.plan(3), rows=2, steps=1, load=at)
    assert resumed.codes == [0, 0, 0], resumed.errors
    assert resumed.lines[0][0].startswith(f"step {1 if background == 'yes' else 2} loss")


def test_python_loads_what_cpp_saved_and_the_other_way_round(plans, tmp_path):
    plan = plans.plan(2)
    whole = in_python(2, plan=plan, steps=3, optimizer="torch.optim.AdamW")
    assert in_cpp(2, plan=plan, steps=2, save=tmp_path / "cpp").codes == [0, 0]
    python = in_python(2, plan=plan, first=2, steps=1, load=tmp_path / "cpp", optimizer="torch.optim.AdamW")
    assert python.codes == [0, 0], python.errors
    numbers = [int(run.lines[0][-2].split()[-1], 16) for run in (whole, python)]
    assert abs(numbers[0] - numbers[1]) < 64, "float32s whose optimizers round in two ways"
