# SPDX-License-Identifier: Apache-2.0
"""`simulate --kineto` and `compare PLAN MEASURED`: what is written as a profile is read back as what was simulated, by
us and by HTA, and two sides that differ by known amounts differ by these."""

import copy
import gzip
import json
import pathlib
import sys

import pytest

PROFILES = pathlib.Path(__file__).resolve().parent / "profiles"
LOW = ("--param-dtype", "bfloat16", "--reduce-dtype", "float32")
UNITS = ("--unit", "blocks.*")
PLANS = {
    "fsdp2": ("--policy", "fsdp2", *UNITS, *LOW),
    "fsdp1": ("--policy", "fsdp1", *UNITS, *LOW),
    "checkpoint": ("--policy", "fsdp2", *UNITS, *LOW, "--checkpoint", "blocks.*"),
    "hsdp": ("--policy", "fsdp2", *UNITS, *LOW, "--mesh", "replicate=2", "shard=4"),
    "one_unit": ("--policy", "fsdp2", "--reshard-after-forward", "false"),
    "micro": ("--policy", "fsdp2", *UNITS, *LOW, "--accumulate", "3"),
}


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    trace = tmp_path_factory.mktemp("traced") / "trace.json"
    trace.write_bytes(gzip.decompress((PROFILES / "trace.json.gz").read_bytes()))
    return trace


@pytest.fixture(scope="module")
def planned(shardplan, traced, tmp_path_factory):
    def plan(name, cluster="h100_sxm_8"):
        path = tmp_path_factory.mktemp(name) / "plan.json"
        done = shardplan("plan", traced, "--cluster", cluster, "--optimizer", "adamw", *PLANS[name], "-q", "-o", path)
        assert done.returncode == 0, done.stderr
        return path

    return plan


def answer(done):
    assert done.returncode == 0, done.stderr
    return done.stdout


def simulated(shardplan, plan):
    return json.loads(answer(shardplan("simulate", plan, "-q", "--report", "-")))


def imported(shardplan, plan, profile, tmp_path):
    out = tmp_path / "measured.json"
    answer(shardplan("import-profile", profile, "--plan", plan, "-q", "-o", out))
    return out, json.loads(out.read_text())


def near(value, ticks):
    """The host's clock of the profile goes on by a nanosecond where the simulated one stands."""
    return pytest.approx(value, abs=ticks, rel=1e-3)


@pytest.mark.parametrize("name", PLANS)
def test_what_was_simulated_is_read_back(name, shardplan, planned, tmp_path):
    plan = planned(name)
    report = simulated(shardplan, plan)
    profile = tmp_path / "rank0.json.gz"
    answer(shardplan("simulate", plan, "-q", "--kineto", profile))
    _, measured = imported(shardplan, plan, profile, tmp_path)
    for field in ("model", "policy", "world_size", "plan_digest"):
        assert measured[field] == report[field]
    for field in ("step_ns", "compute_ns", "communication_ns", "exposed_communication_ns"):
        assert measured[field] == near(report[field], 10), field
    assert measured["tokens_per_second_per_rank"] == pytest.approx(report["tokens_per_second_per_rank"], rel=1e-5)
    activities = [{entry["activity"]: entry["time_ns"] for entry in one["activities"]} for one in (report, measured)]
    assert activities[1] == {activity: near(time, 2000) for activity, time in activities[0].items()}
    assert sum(activities[0].values()) == report["step_ns"]
    facts = ("kind", "communicator", "count", "full_tensor_bytes")
    assert [[entry[f] for f in facts] for entry in measured["collectives"]] == [
        [entry[f] for f in facts] for entry in report["collectives"]
    ]
    for ours, its in zip(report["collectives"], measured["collectives"], strict=True):
        assert its["busy_ns"] == near(ours["busy_ns"], 10) and its["exposed_ns"] == near(ours["exposed_ns"], 2000)
    kernels = [
        {(entry["kind"], entry["phase"]): (entry["count"], entry["busy_ns"]) for entry in one["operators"]}
        for one in (report, measured)
    ]
    assert kernels[0].keys() == kernels[1].keys()
    for key, (count, busy) in kernels[0].items():
        # Time lost to collectives is spread over a pass there, over a segment here.
        assert kernels[1][key][0] == count and kernels[1][key][1] == pytest.approx(
            busy, rel=0.06, abs=0.003 * report["step_ns"]
        ), key
    assert measured["measured"]["collectives_beside_plan"] == measured["measured"]["collectives_missing"] == 0
    assert measured["memory"]["peak_bytes"] == report["memory"]["peak_bytes"]


def test_the_profile_is_the_same_each_time_and_in_either_form(shardplan, planned, tmp_path):
    plan = planned("fsdp2")
    text = answer(shardplan("simulate", plan, "-q", "--kineto", "-"))
    for name in ("a.json.gz", "b.json.gz", "c.json"):
        answer(shardplan("simulate", plan, "-q", "--kineto", tmp_path / name))
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()).decode() == (tmp_path / "c.json").read_text() == text
    events = json.loads(text)["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {
        "FSDP::root_pre_forward",
        "FSDP::all_gather (blocks.1)",
        "FSDP::post_backward_reduce (blocks.2)",
        "Optimizer.step#AdamW.step",
        "ProfilerStep#0",
    } <= names
    launches = {event["args"]["correlation"]: event for event in events if event.get("cat") == "cuda_runtime"}
    for event in events:
        if event.get("cat") == "kernel":
            launch = launches[event["args"]["correlation"]]
            assert launch["ts"] <= event["ts"] and event["dur"] >= 0


def test_hta_reads_it(shardplan, planned, tmp_path):
    """Meta's HolisticTraceAnalysis counts NCCL's kernels as communication and all others as compute: FSDP's copies,
    too."""
    if not (pathlib.Path(sys.prefix) / "requirements-alone.stamp").exists():
        pytest.skip("an environment that tools/setup did not make")
    from hta import trace_analysis

    profile = tmp_path / "rank0.json.gz"
    plan = planned("fsdp2")
    answer(shardplan("simulate", plan, "-q", "--kineto", profile))
    report = simulated(shardplan, plan)
    analysis = trace_analysis.TraceAnalysis(trace_files={0: str(profile)}, trace_dir=str(tmp_path))
    assert trace_analysis.TraceAnalysis(trace_dir=str(tmp_path)).t.get_ranks() == [0]  # it finds the rank in the file
    kernels = [
        event
        for event in json.loads(gzip.decompress(profile.read_bytes()))["traceEvents"]
        if event.get("cat") == "kernel"
    ]
    communication = sum(event["dur"] for event in kernels if event["name"].startswith("nccl"))
    shares, _ = analysis.get_gpu_kernel_breakdown(visualize=False)
    parts = shares[shares["kernel_type"].str.contains("COMMUNICATION")]["sum"].sum()  # alone, and over computation
    nccl = sum(event["name"].startswith("nccl") for event in kernels)
    assert parts == pytest.approx(communication, abs=2 * nccl)  # HTA cuts times to whole microseconds
    time = {entry["activity"]: entry["time_ns"] for entry in report["activities"]}
    hidden = report["communication_ns"] - time["all_gather"] - time.get("reduce_scatter", 0)
    overlap = analysis.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"].iloc[0]  # whole microseconds
    assert overlap == pytest.approx(100 * hidden / report["communication_ns"], abs=4)
    breakdown = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    busy = sum(time.get(name, 0) for name in ("forward", "backward", "optimizer", "copies"))
    assert busy / 1000 - len(kernels) <= breakdown["compute_time(us)"] <= busy / 1000 + 1


def test_a_real_profile_beside_its_plan(shardplan, planned, tmp_path):
    """A small GPT on one H200: two ranks through sockets, so communication is what differs."""
    plan = tmp_path / "plan.json"
    trace = tmp_path / "trace.json"
    trace.write_bytes(gzip.decompress((PROFILES / "trace.json.gz").read_bytes()))
    answer(
        shardplan(
            "plan", trace, "--cluster", "h200_8", "--ranks", "2", "--optimizer", "adamw", *PLANS["fsdp2"], "-q", "-o",
            plan,
        )
    )
    measured = tmp_path / "measured.json"
    answer(
        shardplan(
            "import-profile", PROFILES / "fsdp2_rank0.json.gz", PROFILES / "fsdp2_rank1.json.gz", "--snapshot",
            PROFILES / "fsdp2_rank0.pickle.gz", "--plan", plan, "-q", "-o", measured,
        )
    )
    text = answer(
        shardplan("compare", plan, measured, "--json", tmp_path / "c.json", "--html", tmp_path / "c.html", "-q")
    )
    made = json.loads((tmp_path / "c.json").read_text())
    for side in ("predicted_ns", "measured_ns"):
        assert sum(entry[side] for entry in made["activities"]) == made[side]
    assert "longer than predicted; " in text and "all_gather" in text and "waited for others" in text
    assert made["memory"] == [
        {
            "category": "allocated", "predicted_bytes": made["memory"][0]["predicted_bytes"],
            "measured_bytes": 351_054_848,
        }
    ]
    page = (tmp_path / "c.html").read_text()
    assert "compute, predicted" in page and "compute, measured" in page and "NVIDIA H200" in page
    # On a cluster of its own figures.
    other = answer(shardplan("compare", plan, measured, "--cluster", "a100_80_8", "-q"))
    assert "A100" in other.splitlines()[0] and other != text


def test_known_differences_are_found(shardplan, planned, tmp_path):
    plan = planned("fsdp2")
    report = simulated(shardplan, plan)
    report["measured"] = {"device": "a GPU", "rank": 0, "ranks": 1, "steps_ns": [1]}
    path = tmp_path / "same.json"

    def compared(changed, *more):
        path.write_text(json.dumps(changed))
        done = shardplan("compare", plan, path, *more)
        assert done.returncode in (0, 2, 3), done.stderr
        return done

    same = compared(report)
    assert "the same." in same.stdout and same.returncode == 0
    slower = copy.deepcopy(report)
    slower["step_ns"] += 5_000_000
    next(entry for entry in slower["activities"] if entry["activity"] == "all_gather")["time_ns"] += 4_000_000
    next(entry for entry in slower["activities"] if entry["activity"] == "forward")["time_ns"] += 1_000_000
    next(entry for entry in slower["operators"] if (entry["kind"], entry["phase"]) == ("matmul", "forward"))[
        "busy_ns"
    ] += 1_000_000
    slower["units"][2]["forward_ns"] += 1_000_000
    slower["world_size"] += 8
    text = compared(slower).stdout
    assert "longer than predicted; most of it: all_gather (+4.000 ms)." in text
    assert f"ranks: the plan has {report['world_size']}, the measured step {slower['world_size']}" in text
    lines = {line.strip().split("  ")[0]: line for line in text.splitlines()}
    assert "+1.000 ms" in lines["matmul, forward"] and "+1.000 ms" in lines["forward " + report["units"][2]["unit"]]
    assert "+5.000 ms" in lines["step"]


def test_what_is_no_pair_is_refused(shardplan, planned, traced, tmp_path):
    plan = planned("fsdp2")
    report = simulated(shardplan, plan)
    path = tmp_path / "r.json"

    def refused(changed, *more, code=3):
        path.write_text(json.dumps(changed))
        done = shardplan("compare", plan, path, *more)
        assert done.returncode == code and not done.stdout, (done.returncode, done.stderr)
        return done.stderr

    assert "found a simulated report" in refused(report)
    report["measured"] = {"device": "a GPU", "rank": 0, "ranks": 1, "steps_ns": [1]}
    assert "/activities" in refused({name: value for name, value in report.items() if name != "activities"})
    report["step_ns"] += 1
    assert "do not add up" in refused(report)
    done = shardplan("compare", plan, traced)
    assert done.returncode == 3 and "a report of import-profile" in done.stderr
    done = shardplan("compare", plan, plan, "--html", tmp_path / "x.html")
    assert done.returncode == 2 and not (tmp_path / "x.html").exists()
    done = shardplan("compare", plan, path, "--html", path)
    assert done.returncode == 2 and json.loads(path.read_text()) == report


