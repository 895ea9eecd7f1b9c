# SPDX-License-Identifier: Apache-2.0
"""A LibTorch model in C++ trains by a plan as the same model in Python does: losses, norms and checkpoints bit for bit."""

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
    "micro-batches reduced once": (2, ("--accumulate", "2", "--no-sync"), {"microbatches": 2, "rows": 1, "no_sync": "yes"}),
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
