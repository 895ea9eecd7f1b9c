# SPDX-License-Identifier: Apache-2.0
"""The `shardplan` command as a user meets it: help, exit codes, error texts, round trips."""

import json
import pathlib

import pytest
from conftest import ROOT

TRACE = ROOT / "examples" / "three_layers" / "trace.json"
CLUSTER = ROOT / "examples" / "three_layers" / "cluster.json"
COMMANDS = (
    "sweep torchtitan evaluate memory rehearse trace plan optimize certify validate simulate cost calibrate "
    "import-profile allocator-replay explain explain-memory compare diff show run export conformance layout reshard "
    "reshard-checkpoint doctor"
).split()


@pytest.fixture(scope="module")
def plan(shardplan, tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    result = shardplan("plan", TRACE, "--cluster", CLUSTER, "--unit", "layers.*", "-o", path)
    assert result.returncode == 0, result.stderr
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_an_example(shardplan, command):
    result = shardplan(command, "--help")
    assert result.returncode == 0
    assert f"shardplan {command} " in result.stdout.split("xample")[-1]


def test_usage_errors_exit_2(shardplan):
    result = shardplan()
    assert result.returncode == 2 and "a command is missing" in result.stderr
    result = shardplan("plam")
    assert result.returncode == 2 and "no such command: plam" in result.stderr
    assert "The commands are " + " ".join(COMMANDS) in result.stderr
    assert shardplan("plan", TRACE, "--policy", "fsdp3").returncode == 2
    result = shardplan("plan", TRACE, "--cluster", CLUSTER, "--reshard-after-forward", "perhaps", "-o", "-")
    assert result.returncode == 2
    assert "perhaps" in result.stderr and "none, true, false" in result.stderr


def test_missing_file_exits_3_and_names_it(shardplan, tmp_path):
    result = shardplan("plan", tmp_path / "nowhere.json", "--cluster", CLUSTER)
    assert result.returncode == 3
    assert "nowhere.json" in result.stderr


def test_unknown_cluster_lists_the_shipped_ones(shardplan):
    result = shardplan("plan", TRACE, "--cluster", "abacus", "-o", "-")
    assert result.returncode == 3
    assert "h100_sxm_8" in result.stderr


def test_truncated_plan_is_bad_input_with_its_position(shardplan, plan, tmp_path):
    text = plan.read_text()
    broken = tmp_path / "truncated.json"
    broken.write_text(text[: len(text) // 2])
    for command in (["validate"], ["simulate"], ["show"]):
        result = shardplan(*command, broken)
        assert result.returncode == 3, result.stdout + result.stderr
        assert "truncated.json" in result.stderr and "line" in result.stderr


def test_wrong_field_is_named_with_pointer_found_and_expected(shardplan, plan, tmp_path):
    document = json.loads(plan.read_text())
    document["buffers"][1]["role"] = "spoon"
    broken = tmp_path / "wrong.json"
    broken.write_text(json.dumps(document))
    result = shardplan("validate", broken)
    assert result.returncode == 3
    assert "/buffers/1/role" in result.stderr and "spoon" in result.stderr

    document = json.loads(plan.read_text())
    document["bufers"] = []
    broken.write_text(json.dumps(document))
    result = shardplan("validate", broken)
    assert result.returncode == 3
    assert "bufers" in result.stderr


def test_a_rule_that_matches_nothing_is_bad_input(shardplan):
    result = shardplan("plan", TRACE, "--cluster", CLUSTER, "--unit", "blocks.*", "-o", "-")
    assert result.returncode == 3
    assert "blocks.*" in result.stderr


def test_a_mesh_of_another_size_is_bad_input(shardplan):
    result = shardplan("plan", TRACE, "--cluster", CLUSTER, "--mesh", "replicate=3", "shard=5", "-o", "-")
    assert result.returncode == 3
    assert "15" in result.stderr


def test_a_full_disk_exits_4_and_leaves_nothing(shardplan):
    result = shardplan("plan", TRACE, "--cluster", CLUSTER, "-o", "/dev/full/plan.json")
    assert result.returncode == 4
    with open("/dev/full", "w") as full:
        import os
        import subprocess

        from conftest import build_folder

        done = subprocess.run(
            [build_folder() / "bin" / "shardplan", "plan", TRACE, "--cluster", CLUSTER, "-q", "-o", "-"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
    assert done.returncode == 4, done.stderr
    assert "space" in done.stderr


def test_plans_are_the_same_bytes_every_time(shardplan, plan, tmp_path):
    again = tmp_path / "again.json"
    assert shardplan("plan", TRACE, "--cluster", CLUSTER, "--unit", "layers.*", "-o", again).returncode == 0
    assert again.read_bytes() == plan.read_bytes()


def test_shown_text_parses_back_to_the_same_plan(shardplan, plan, tmp_path):
    text, back = tmp_path / "plan.txt", tmp_path / "back.json"
    assert shardplan("show", plan, "-o", text).returncode == 0
    result = shardplan("show", text, "--json", "-o", back)
    assert result.returncode == 0, result.stderr
    assert back.read_bytes() == plan.read_bytes()
    assert shardplan("diff", plan, text).stdout == "the plans are equal\n"


def test_diff_of_two_policies_exits_1_and_speaks_of_the_change(shardplan, plan, tmp_path):
    other = tmp_path / "other.json"
    assert shardplan("plan", TRACE, "--cluster", CLUSTER, "--unit", "layers.*", "--reshard-after-forward", "false",
                     "-o", other).returncode == 0
    result = shardplan("diff", plan, other)
    assert result.returncode == 1
    assert "reshard_after_forward" in result.stdout


def test_simulate_writes_report_timeline_and_html(shardplan, plan, tmp_path):
    report, timeline, html = tmp_path / "r.json", tmp_path / "t.json", tmp_path / "r.html"
    result = shardplan("simulate", plan, "--report", report, "--timeline", timeline, "--html", html)
    assert result.returncode == 0, result.stderr
    assert shardplan("validate", report).returncode == 0
    events = json.loads(timeline.read_text())["traceEvents"]
    assert {"M", "X", "C"} <= {event["ph"] for event in events}
    assert "<svg" in html.read_text() or "<canvas" in html.read_text()
    assert "http" not in html.read_text().replace("http://www.w3.org/2000/svg", "")


def test_a_plan_that_does_not_fit_exits_1(shardplan, plan, tmp_path):
    cluster = json.loads(CLUSTER.read_text())
    cluster["device"]["memory_bytes"] = 1 << 20
    small = tmp_path / "small.json"
    small.write_text(json.dumps(cluster))
    result = shardplan("simulate", plan, "--cluster", small)
    assert result.returncode == 1, result.stderr


def test_graph_is_graphviz(shardplan, tmp_path):
    dot = tmp_path / "g.dot"
    assert shardplan("plan", TRACE, "--cluster", CLUSTER, "-o", tmp_path / "p.json", "--graph", dot).returncode == 0
    text = dot.read_text()
    assert text.startswith("digraph") and "layers.0" in text and text.rstrip().endswith("}")


def test_explain_says_why(shardplan, tmp_path):
    result = shardplan("plan", TRACE, "--cluster", CLUSTER, "-o", tmp_path / "p.json", "--explain")
    assert result.returncode == 0
    assert "prefetch_backward" in result.stdout


def test_run_prints_measured_beside_simulated(shardplan, tmp_path):
    cluster = json.loads(CLUSTER.read_text())
    cluster["ranks"] = cluster["ranks_per_node"] = 2
    for table in cluster["collectives"]:
        table["ranks"] = 2
    two = tmp_path / "two.json"
    two.write_text(json.dumps(cluster))
    plan = tmp_path / "plan.json"
    assert shardplan("plan", TRACE, "--cluster", two, "--optimizer", "none", "-o", plan).returncode == 0
    result = shardplan("run", plan, "--device", "virtual", "--steps", "2", "--no-activations")
    assert result.returncode == 0, result.stderr
    result = shardplan("run", plan, "--ranks", "2", "--device", "cpu", "--compute-scale", "0.01", "--steps", "2",
                       "--no-activations")
    assert result.returncode == 0, result.stderr
    assert "measured" in result.stdout and "simulated" in result.stdout
    assert "245.000 ms" in result.stdout


def test_run_with_another_number_of_ranks_is_a_usage_error(shardplan, plan):
    result = shardplan("run", plan, "--ranks", "3")
    assert result.returncode == 2
    assert "found --ranks 3, expected 8" in result.stderr


def test_plans_of_ranks_that_agree_verify_together(shardplan, plan, tmp_path):
    ranks = json.loads(plan.read_text())["world_size"]
    other = tmp_path / "other.txt"  # the same plan in the other form
    assert shardplan("show", plan, "-o", other).returncode == 0
    result = shardplan("validate", "--ranks-apart", *[plan] * (ranks - 1), other)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"ranks 0 to {ranks - 2}: {plan}: plan of " in result.stdout
    assert f"rank {ranks - 1}: {other}: plan of " in result.stdout
    assert f"{ranks} ranks: the plans verify together" in result.stdout


def test_ranks_that_issue_other_collectives_exit_1_and_both_are_named(shardplan, plan, tmp_path):
    ranks = json.loads(plan.read_text())["world_size"]
    other = tmp_path / "other.json"  # a good plan by itself, with fewer all-gathers
    assert shardplan("plan", TRACE, "--cluster", CLUSTER, "--unit", "layers.*", "--reshard-after-forward", "false",
                     "-o", other).returncode == 0
    assert shardplan("validate", plan, other).returncode == 0
    result = shardplan("validate", "--ranks-apart", *[plan] * (ranks - 1), other)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{other}: collective_order: rank {ranks - 1}: collective number" in result.stdout
    assert "differs between rank 0 and rank" in result.stdout
    assert "\n  rank 0: " in result.stdout and f"\n  rank {ranks - 1}: " in result.stdout
    assert f"{ranks} ranks: 1 violation\n" in result.stdout


def all_reduces_at_the_end(plan, path, communicators):
    """The plan with an all-reduce on each of the communicators, one after the other, at the end of every step."""
    document = json.loads(plan.read_text())
    document["communicators"].append({"name": "other", "size": document["world_size"], "stride": 1})
    for communicator in communicators:
        document["buffers"].append({"name": f"check.{communicator}", "role": "order_check", "dtype": "int64",
                                    "parts_bytes": [8], "persistent": True})
    for step in document["steps"]:
        step["triggers"][-1]["instructions"] += [
            {"kind": "all_reduce", "src": f"check.{name}", "communicator": name, "stream": "compute"}
            for name in communicators
        ]
    path.write_text(json.dumps(document))
    return path


def test_ranks_that_wait_for_each_other_in_a_circle_exit_1(shardplan, plan, tmp_path):
    one = all_reduces_at_the_end(plan, tmp_path / "one.json", ["shard", "other"])
    two = all_reduces_at_the_end(plan, tmp_path / "two.json", ["other", "shard"])
    ranks = json.loads(plan.read_text())["world_size"]
    assert shardplan("validate", one, two).returncode == 0
    assert shardplan("validate", "--ranks-apart", *[two] * ranks).returncode == 0
    result = shardplan("validate", "--ranks-apart", one, *[two] * (ranks - 1))
    assert result.returncode == 1, result.stdout + result.stderr
    assert "deadlock: rank 0: ranks wait for each other in a circle, and none of them can go on" in result.stdout
    assert "waits for rank 0" in result.stdout and "waits for rank 1" in result.stdout


def test_a_violation_of_one_rank_alone_names_its_file(shardplan, plan, tmp_path):
    ranks = json.loads(plan.read_text())["world_size"]
    document = json.loads(plan.read_text())
    trigger = next(t for t in document["steps"][-1]["triggers"]
                   if any(i["kind"] == "free" for i in t["instructions"]))
    trigger["instructions"] = [i for i in trigger["instructions"] if i["kind"] != "free"]
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(document))
    result = shardplan("validate", "--ranks-apart", *[plan] * (ranks - 1), broken)
    assert result.returncode == 1
    assert f"{broken}: " in result.stdout and f"rank {ranks - 1}: " in result.stdout


def test_ranks_apart_takes_a_plan_for_each_rank(shardplan, plan):
    ranks = json.loads(plan.read_text())["world_size"]
    for count in (1, ranks + 1):
        result = shardplan("validate", "--ranks-apart", *[plan] * count)
        assert result.returncode == 2, result.stdout
        assert f"plan for {ranks} ranks" in result.stderr and f"given {count} file" in result.stderr
    result = shardplan("validate", "--ranks-apart", plan, TRACE)
    assert result.returncode == 2
    assert f"takes plans, but {TRACE} is a trace" in result.stderr
    assert shardplan("validate", "--ranks-apart", plan, "nowhere.json").returncode == 3
