# SPDX-License-Identifier: Apache-2.0
"""`shardplan plan --stop-after`, `--dump`, `--skip` and `--list-passes`."""

import json

import pytest
from conftest import ROOT

TRACE = ROOT / "examples" / "three_layers" / "trace.json"
CLUSTER = ROOT / "examples" / "three_layers" / "cluster.json"
PASSES = (
    "apply_checkpointing fuse_operators choose_units split_ties extend_gradients join_tensors record_order "
    "offload_activations place_events await_copies "
    "build_graph linearise describe digest verify"
).split()
ARGUMENTS = ["--cluster", CLUSTER, "--unit", "layers.*", "-q"]


def steps_of(path):
    return json.loads(path.read_text())["steps"]


def test_passes_are_listed_in_order(shardplan):
    result = shardplan("plan", "--list-passes")
    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()] == PASSES


@pytest.mark.parametrize(
    "name, begin",
    [
        ("apply_checkpointing", "{"),
        ("fuse_operators", "{"),
        ("choose_units", "unit 0: (root)\n"),
        ("split_ties", "{"),
        ("extend_gradients", "{"),
        ("join_tensors", "{"),
        ("record_order", "step 0\n  forward_begin"),
        ("place_events", "{"),
        ("build_graph", "digraph"),
        ("linearise", "{"),
        ("describe", "{"),
        ("digest", "{"),
        ("verify", "the plan verifies\n"),
    ],
)
def test_what_each_pass_made_is_written(shardplan, name, begin):
    result = shardplan("plan", TRACE, *ARGUMENTS, "--stop-after", name, "--dump")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(begin), result.stdout[:200]
    if begin == "{":
        json.loads(result.stdout)


def test_a_rewritten_trace_is_read_again_and_planned_alike(shardplan, tmp_path):
    checkpointed, direct, indirect = tmp_path / "trace.json", tmp_path / "direct.json", tmp_path / "indirect.json"
    rule = ["--checkpoint", "layers.*"]
    assert shardplan("plan", TRACE, *ARGUMENTS, *rule, "-o", direct).returncode == 0
    result = shardplan(
        "plan", TRACE, *ARGUMENTS, *rule, "--stop-after", "apply_checkpointing", "--dump", "-o", checkpointed
    )
    assert result.returncode == 0 and result.stdout == "", result.stderr
    assert checkpointed.read_bytes() != TRACE.read_bytes()
    assert shardplan("plan", checkpointed, *ARGUMENTS, "-o", indirect).returncode == 0
    assert steps_of(indirect) == steps_of(direct)


def test_the_plan_of_the_last_passes_is_the_plan(shardplan, tmp_path):
    whole, described = tmp_path / "whole.json", tmp_path / "described.json"
    assert shardplan("plan", TRACE, *ARGUMENTS, "-o", whole).returncode == 0
    result = shardplan("plan", TRACE, *ARGUMENTS, "--stop-after", "digest", "--dump", "-o", described)
    assert result.returncode == 0, result.stderr
    assert described.read_bytes() == whole.read_bytes()


def test_stopping_runs_no_later_pass_and_writes_nothing(shardplan, tmp_path):
    result = shardplan("plan", TRACE, *ARGUMENTS[:-1], "--stop-after", "record_order", "-o", tmp_path / "plan.json")
    assert result.returncode == 0, result.stderr
    assert "record_order" in result.stderr and "place_events" not in result.stderr
    assert result.stdout == "" and not list(tmp_path.iterdir())


def test_a_skipped_pass_does_not_run(shardplan, tmp_path):
    plain, skipped = tmp_path / "plain.json", tmp_path / "skipped.json"
    assert shardplan("plan", TRACE, *ARGUMENTS, "-o", plain).returncode == 0
    result = shardplan(
        "plan", TRACE, *ARGUMENTS[:-1], "--checkpoint", "layers.*", "--skip", "apply_checkpointing", "--skip", "verify",
        "-o", skipped,
    )
    assert result.returncode == 0, result.stderr
    assert "apply_checkpointing" not in result.stderr and "verify" not in result.stderr
    assert steps_of(skipped) == steps_of(plain)
    result = shardplan("plan", TRACE, *ARGUMENTS, "--skip", "build_graph", "--skip", "linearise", "-o", skipped)
    assert result.returncode == 0, result.stderr
    assert steps_of(skipped) == steps_of(plain)


@pytest.mark.parametrize("arguments, words", [
    (["--skip", "choose_units"], ["choose_units cannot be skipped", "split_ties needs it"]),
    (["--skip", "describe"], ["describe cannot be skipped"]),
    (["--skip", "build_graph"], ["linearise needs it"]),
    (["--skip", "linearize"], ["no such pass", "linearize", "linearise"]),
    (["--stop-after", "nothing", "--dump"], ["no such pass", "nothing", "record_order"]),
    (["--stop-after", "verify", "--skip", "verify", "--dump"], ["verify is skipped"]),
    (["--dump"], ["--stop-after"]),
    (["--stop-after", "choose_units", "--graph", "graph.dot"], ["--graph"]),
    (["--stop-after", "choose_units", "--explain"], ["--explain"]),
])
def test_what_makes_no_sense_is_a_usage_error(shardplan, tmp_path, arguments, words):
    result = shardplan("plan", TRACE, *ARGUMENTS, *arguments, "-o", tmp_path / "plan.json")
    assert result.returncode == 2, result.stdout + result.stderr
    for word in words:
        assert word in result.stderr
    assert not list(tmp_path.iterdir())


def test_the_schedule_is_explained(shardplan, tmp_path):
    result = shardplan("plan", TRACE, *ARGUMENTS, "--explain-schedule", "-o", tmp_path / "plan.json")
    assert result.returncode == 0, result.stderr
    assert "where each collective may be issued" in result.stdout and "all_gather layers.1" in result.stdout
    assert "no work can move across\n  " in result.stdout and "critical path: " in result.stdout
