# SPDX-License-Identifier: Apache-2.0
"""`shardplan optimize` and `shardplan certify`."""

import json
import os
import signal
import subprocess
from xml.etree import ElementTree

import pytest
from conftest import ROOT, build_folder

TRACE = ROOT / "examples" / "three_layers" / "trace.json"
CLUSTER = ROOT / "examples" / "three_layers" / "cluster.json"
JOB = [TRACE, "--cluster", CLUSTER]


@pytest.fixture(scope="module")
def made(shardplan, tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimized")
    files = {name: folder / f"{name}.json" for name in ("plan", "certificate", "report", "strategy")}
    result = shardplan(
        "optimize", *JOB, "--memory-budget", "device", "--allow", "policy", "-o", files["plan"], "--certificate",
        files["certificate"], "--report", files["report"], "--write-strategy", files["strategy"], "--time-limit",
        "2min",
    )
    assert result.returncode == 0, result.stderr
    assert "best so far" in result.stderr and "lower bound" in result.stdout
    return files


def load(path):
    return json.loads(path.read_text())


def test_the_plan_verifies_and_is_what_the_report_says(shardplan, made, tmp_path):
    assert shardplan("validate", made["plan"]).returncode == 0
    simulated = tmp_path / "simulated.json"
    assert shardplan("simulate", made["plan"], "--report", simulated).returncode == 0
    report = load(made["report"])
    assert report["step_ns"] == load(simulated)["step_ns"]
    assert report["complete"] and report["lower_bound_ns"] <= report["step_ns"]
    assert report["gap_ppm"] == (report["step_ns"] - report["lower_bound_ns"]) * 1_000_000 // report["lower_bound_ns"]
    assert (
        report["peak_allocated_bytes"]
        <= report["peak_pooled_bytes"]
        <= report["peak_reserved_bytes"]
        <= report["budget_bytes"]
    )
    assert all(report["step_ns"] <= baseline["step_ns"] for baseline in report["baselines"] if baseline["fits"])
    assert {decision["decision"] for decision in report["decisions"]} >= {"units", "reshard", "prefetch"}


def test_the_strategy_makes_the_same_plan(shardplan, made, tmp_path):
    again = tmp_path / "plan.json"
    result = shardplan("plan", *JOB, "--strategy", made["strategy"], "-o", again, "-q")
    assert result.returncode == 0, result.stderr
    assert again.read_bytes() == made["plan"].read_bytes()


def test_no_setting_of_the_knobs_is_faster(shardplan, made, tmp_path):
    step = load(made["report"])["step_ns"]
    plan, simulated = tmp_path / "plan.json", tmp_path / "simulated.json"
    for knobs in (
        ["--policy", "fsdp2"],
        ["--policy", "fsdp2", "--reshard-after-forward", "false"],
        ["--policy", "fsdp1"],
        ["--policy", "fsdp2", "--forward-prefetch", "2", "--backward-prefetch", "2", "--separate-reduce-scatter"],
        ["--policy", "fsdp1", "--sharding", "shard_grad_op"],
    ):
        assert shardplan("plan", *JOB, *knobs, "-o", plan, "-q").returncode == 0
        assert shardplan("simulate", plan, "--report", simulated, "-q").returncode == 0
        assert step <= load(simulated)["step_ns"], knobs


def test_the_certificate_holds(shardplan, made):
    result = shardplan("certify", made["plan"], made["certificate"], "--trace", TRACE)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("holds: ")


@pytest.mark.parametrize("change", [
    lambda c: c.update(lower_bound_ns=c["lower_bound_ns"] + 1),
    lambda c: c.update(step_ns=c["step_ns"] - 1),
    lambda c: c.update(budget_bytes=c["peak_pooled_bytes"] - 1),
    lambda c: c["branches"].pop(),
    lambda c: c["branches"][0].update(lower_bound_ns=c["branches"][0]["lower_bound_ns"] + 1),
    lambda c: [window.update(kernels=2**20) or window.update(links=[2**20] * len(window["links"]))
               for window in c["branches"][0]["windows"]],
    lambda c: c["cuts"].pop(),
])
def test_a_changed_certificate_is_refused(shardplan, made, tmp_path, change):
    changed = load(made["certificate"])
    change(changed)
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(changed))
    result = shardplan("certify", made["plan"], path, "--trace", TRACE)
    assert result.returncode == 1 and str(path) in result.stderr, result.stderr


def test_a_certificate_of_another_plan_is_refused(shardplan, made, tmp_path):
    other = tmp_path / "plan.json"
    assert shardplan("plan", *JOB, "--policy", "fsdp2", "-o", other, "-q").returncode == 0
    assert shardplan("certify", other, made["certificate"], "--trace", TRACE).returncode == 1
    broken = tmp_path / "certificate.json"
    broken.write_text(made["certificate"].read_text()[:200])
    result = shardplan("certify", made["plan"], broken, "--trace", TRACE)
    assert result.returncode == 3 and str(broken) in result.stderr


@pytest.mark.parametrize("policy", ("fsdp1", "fsdp2"))
def test_the_policy_stays_unless_another_is_allowed(shardplan, tmp_path, policy):
    files = [tmp_path / f"{name}.json" for name in ("plan", "report", "certificate")]
    result = shardplan(
        "optimize", *JOB, "--policy", policy, "--memory-budget", "device", "-o", files[0], "--report", files[1],
        "--certificate", files[2], "-q",
    )
    assert result.returncode == 0, result.stderr
    assert load(files[0])["policy"] == policy
    names = [baseline["name"] for baseline in load(files[1])["baselines"]]
    assert all(name == "as given" or name.startswith(policy) for name in names), names
    assert len(load(files[2])["branches"]) == 1, "the bound is of this policy's layout"
    assert (
        shardplan("optimize", *JOB, "--fix", "policy", "--memory-budget", "device", "-o", files[0], "-q").returncode
        == 2
    )


def test_without_a_plan_in_the_budget_it_says_what_is_missing(shardplan, tmp_path):
    result = shardplan("optimize", *JOB, "--memory-budget", "1KiB", "-o", tmp_path / "plan.json", "-q")
    assert result.returncode == 1 and not list(tmp_path.iterdir())
    for words in (
        "the least budget of one is", "none of the class", "--allow checkpoint",
        "no number of ranks would do: activations alone exceed the budget",
    ):
        assert words in result.stderr


def test_the_robust_plan_is_no_worse_than_the_fastest_at_the_worst_of_the_costs(shardplan, tmp_path):
    plan, report = tmp_path / "plan.json", tmp_path / "report.json"
    result = shardplan("optimize", *JOB, "--memory-budget", "device", "--robust", "20%", "-o", plan, "--report", report)
    assert result.returncode == 0, result.stderr
    assert "costs up to 20 % off" in result.stdout and "compute +20 %, links -20 %, overlap +20 %" in result.stdout
    made = load(report)
    robust = made["robust"]
    assert robust["off_ppm"] == 200_000 and len(robust["corners"]) == 8
    assert (
        robust["worst_ns"]
        == max(made["step_ns"], *(corner["step_ns"] for corner in robust["corners"]))
        <= robust["plain_worst_ns"]
    )
    assert robust["plain_step_ns"] <= made["step_ns"]
    assert shardplan("explain", plan, "--report", report).returncode == 0
    for wrong in ("20", "0%", "95%", "much", "-20%"):
        result = shardplan("optimize", *JOB, "--memory-budget", "device", f"--robust={wrong}", "-o", plan, "-q")
        assert result.returncode == 2 and "--robust" in result.stderr, result.stderr


def test_the_mesh_is_decided_where_that_is_allowed(shardplan, tmp_path):
    files = {name: tmp_path / f"{name}.json" for name in ("plan", "report", "certificate", "strategy")}
    result = shardplan(
        "optimize", *JOB, "--memory-budget", "device", "--allow", "mesh,policy", "-o", files["plan"], "--report",
        files["report"], "--certificate", files["certificate"], "--write-strategy", files["strategy"],
    )
    assert result.returncode == 0, result.stderr
    assert "meshes and micro-batches" in result.stdout and "mesh replicate=4,shard=2" in result.stderr
    report = load(files["report"])
    assert {variant["mesh"] for variant in report["variants"]} == {
        "shard=8", "replicate=2,shard=4", "replicate=4,shard=2",
    }
    chosen, = (variant for variant in report["variants"] if variant["outcome"] == "chosen")
    assert chosen["step_ns"] == report["step_ns"] and chosen["mesh"] == ",".join(
        f"{dim['name']}={dim['size']}" for dim in load(files["strategy"])["mesh"]
    )
    assert report["variants_lower_bound_ns"] == min(variant["lower_bound_ns"] for variant in report["variants"])
    assert shardplan("certify", files["plan"], files["certificate"], "--trace", TRACE).returncode == 0
    for variant in report["variants"]:
        mesh = variant["mesh"].split(",")
        alone = shardplan(
            "optimize", *JOB, "--memory-budget", "device", "--allow", "policy", "--mesh", *mesh, "-o", files["plan"],
            "--report", files["report"], "-q",
        )
        assert alone.returncode == 0, alone.stderr
        assert report["step_ns"] <= load(files["report"])["step_ns"]
    refused = shardplan(
        "optimize", *JOB, "--memory-budget", "device", "--allow", "mesh", "--mesh", "shard=8", "-o", files["plan"], "-q"
    )
    assert refused.returncode == 2 and "the mesh is given" in refused.stderr


def test_the_microbatch_of_a_global_batch_is_decided(shardplan, tmp_path):
    half = load(TRACE)
    half["tokens_per_batch"] //= 2
    half["inputs"][0]["shape"][0] //= 2
    for event in [event for passes in ("forwards", "backwards") for one in half[passes] for event in one["events"]]:
        if event[0] == "operator" and isinstance(event[-1], dict) and "duration_ns" in event[-1]:
            event[-1]["duration_ns"] = event[-1]["duration_ns"] * 6 // 10
    other, report = tmp_path / "half.json", tmp_path / "report.json"
    other.write_text(json.dumps(half))
    job = [other, *JOB, "--memory-budget", "device", "-o", tmp_path / "plan.json", "--report", report, "-q"]
    result = shardplan("optimize", *job, "--global-batch", 8 * 8192)
    assert result.returncode == 0, result.stderr
    variants = load(report)["variants"]
    assert [(variant["trace"], variant["microbatch_size"], variant["microbatches"]) for variant in variants] == [
        (str(other), 4096, 2),
        (str(TRACE), 8192, 1),
    ]
    assert sum(variant["outcome"] == "chosen" for variant in variants) == 1
    for flags, words in (
        (["--global-batch", 8 * 8192 + 1], "a multiple of 32768: micro-batches of 4096 on 8 ranks"),
        ([], "--global-batch says how many"),
        (["--global-batch", 8 * 8192, "--accumulate", 2], "the training loop is given"),
    ):
        result = shardplan("optimize", *job, *flags)
        assert result.returncode == 2 and words in result.stderr, result.stderr
    half["parameters"][0]["shape"][0] *= 2
    other.write_text(json.dumps(half))
    result = shardplan("optimize", *job, "--global-batch", 8 * 8192)
    assert result.returncode == 3 and "half.json" in result.stderr, result.stderr


@pytest.mark.parametrize(
    "flags, flag",
    [
        (["--memory-budget", "much"], "--memory-budget"),
        (["--memory-budget", "-1GiB"], "--memory-budget"),
        (["--memory-budget", "nan"], "--memory-budget"),
        (["--memory-budget", "1e400"], "--memory-budget"),
        (["--memory-budget", "1GiB", "--time-limit", "soon"], "--time-limit"),
        (["--memory-budget", "1GiB", "--allow", "all"], "--allow"),
        (["--memory-budget", "1GiB", "--fix", "all"], "--fix"),
        ([], "--memory-budget"),
    ],
)
def test_wrong_flags_are_named(shardplan, flags, flag, tmp_path):
    result = shardplan("optimize", *JOB, *flags, "-o", tmp_path / "plan.json")
    assert result.returncode == 2 and flag in result.stderr, result.stderr


def test_a_signal_ends_the_search_and_the_best_is_written(tmp_path):
    plan, report = tmp_path / "plan.json", tmp_path / "report.json"
    command = [
        build_folder() / "bin" / "shardplan", "optimize", *JOB, "--memory-budget", "device", "--allow", "checkpoint",
        "--threads", "1", "--time-limit", "2min", "-o", plan, "--report", report,
    ]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    process.stderr.readline()  # the first plan is there
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0
    # A search of a small model may be over before the signal comes.
    assert load(report)["step_ns"] > 0 and load(plan)["schema"] == "shardplan.plan/1"


def test_explain_says_what_units_do_and_what_memory_is_worth(shardplan, made, tmp_path):
    picture = tmp_path / "curve.svg"
    result = shardplan("explain", made["plan"], "--report", made["report"], "--plot", picture)
    assert result.returncode == 0, result.stderr
    assert "gathered from all ranks" in result.stdout and "this plan" in result.stdout
    report = load(made["report"])
    points = [(point["peak_reserved_bytes"], point["step_ns"]) for point in report["curve"]]
    assert points == sorted(points) and [time for _, time in points] == sorted(
        (time for _, time in points), reverse=True
    )
    assert any(time <= report["step_ns"] and size <= report["budget_bytes"] for size, time in points)
    svg = ElementTree.parse(picture).getroot()
    circles = [element for element in svg if element.tag.endswith("circle")]
    assert len(circles) == len(report["baselines"]) + 1


def test_explain_refuses_what_does_not_belong_together(shardplan, made, tmp_path):
    other = tmp_path / "plan.json"
    assert shardplan("plan", *JOB, "--policy", "fsdp2", "-o", other, "-q").returncode == 0
    assert shardplan("explain", other).returncode == 0
    result = shardplan("explain", other, "--report", made["report"])
    assert result.returncode == 3 and "/plan_digest" in result.stderr
    assert shardplan("explain", other, "--plot", tmp_path / "curve.svg").returncode == 2
