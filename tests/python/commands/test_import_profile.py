# SPDX-License-Identifier: Apache-2.0
"""`shardplan import-profile`: profiles of real GPUs and of ranks recorded here, next to what the plan has and to plain
sums over the files."""

import collections
import gzip
import json
import os
import pathlib
import pickle
import sys

import jsonschema
import pytest
from conftest import ROOT, plans_in

sys.path.append(str(ROOT / "tests" / "python" / "adapter"))

PROFILES = pathlib.Path(__file__).resolve().parent / "profiles"
LOW = ("--param-dtype", "bfloat16", "--reduce-dtype", "float32")


@pytest.fixture(scope="module")
def plans(shardplan, tmp_path_factory):
    """By policy, the plan of the jobs in PROFILES."""
    folder = tmp_path_factory.mktemp("plans")
    trace = folder / "trace.json"
    trace.write_bytes(gzip.decompress((PROFILES / "trace.json.gz").read_bytes()))
    made = {}
    for policy in ("fsdp2", "fsdp1"):
        made[policy] = folder / f"{policy}.json"
        done = shardplan(
            "plan", trace, "--cluster", "h200_8", "--ranks", "2", "--policy", policy, "--unit", "blocks.*",
            "--optimizer", "adamw", *LOW, "-q", "-o", made[policy],
        )
        assert done.returncode == 0, done.stderr
    return made


@pytest.fixture
def imported(shardplan, tmp_path):
    def run(*arguments):
        done = shardplan("import-profile", *arguments, "-o", tmp_path / "measured.json", "-q")
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "measured.json").read_text())

    return run


def raw(name: str) -> list[dict]:
    return json.loads(gzip.decompress((PROFILES / name).read_bytes()))["traceEvents"]


def launched_in_steps(events: list[dict]) -> dict[int, list[dict]]:
    """By duration of a step in ns, its kernels: a plain walk over the file."""
    steps = [
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")
    ]
    launches = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e["args"]
    }
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return {
        round(1000 * (end - begin)): [k for k in kernels if begin <= launches[k["args"]["correlation"]] < end]
        for begin, end in steps
    }


@pytest.mark.parametrize(
    ("name", "policy"), [("fsdp2_rank0", "fsdp2"), ("plan_fsdp2_rank0", "fsdp2"), ("fsdp1_rank0", "fsdp1")]
)
def test_every_kernel_of_a_gpu_is_counted_once(name, policy, plans, imported):
    report = imported(PROFILES / f"{name}.json.gz", "--plan", plans[policy])
    kernels = min(launched_in_steps(raw(f"{name}.json.gz")).items())  # the faster one of two is the median
    assert abs(report["step_ns"] - kernels[0]) <= 2
    assert sum(stream["operations"] for stream in report["streams"]) == len(kernels[1])
    nccl = [k for k in kernels[1] if k["name"].startswith("nccl")]
    assert sum(entry["count"] for entry in report["collectives"]) == len(nccl)
    assert abs(
        sum(entry["busy_ns"] for entry in report["collectives"]) - sum(1000 * k["dur"] for k in nccl)
    ) <= 2 * len(nccl)
    # Work of the model, the loss and the optimizer is in one class, and in one unit, or counted as in none.
    of_classes = sum(entry["busy_ns"] for entry in report["operators"] if entry["phase"] != "optimizer")
    of_units = sum(unit["forward_ns"] + unit["backward_ns"] for unit in report["units"])
    assert of_classes == of_units + report["measured"]["unassigned_ns"]
    assert report["measured"]["unassigned_ns"] < of_classes / 8  # the loss, which is in no unit
    assert all(unit["forward_ns"] > 0 and unit["backward_ns"] > 0 for unit in report["units"])
    equal = [unit["forward_ns"] for unit in report["units"] if unit["unit"] != "(root)"]
    assert max(equal) < 1.3 * min(equal)  # blocks of one shape


def test_collectives_are_those_of_the_plan_with_their_bytes(plans, imported, shardplan):
    simulated = json.loads(shardplan("simulate", plans["fsdp2"], "--report", "-", "-q").stdout)
    report = imported(PROFILES / "fsdp2_rank0.json.gz", "--plan", plans["fsdp2"])
    facts = ("kind", "communicator", "count", "full_tensor_bytes")
    assert [[entry[f] for f in facts] for entry in report["collectives"]] == [
        [entry[f] for f in facts] for entry in simulated["collectives"]
    ]
    assert report["measured"]["collectives_beside_plan"] == report["measured"]["collectives_missing"] == 0
    # Original parameters are padded otherwise: said, not passed over.
    other = imported(PROFILES / "fsdp1_rank0.json.gz", "--plan", plans["fsdp1"])
    assert other["measured"]["collectives_beside_plan"] == 14 and any(
        "the plan has 9 of" in note for note in other["notes"]
    )


@pytest.mark.parametrize(
    ("name", "device", "ranks", "collectives"),
    [
        ("hta_ddp_a100", "NVIDIA A100-PG509-200", 2, {"all_reduce": 4, "broadcast": 2}),
        ("hta_ddp_v100", "Tesla V100-SXM2-32GB", 2, {"all_reduce": 6}),
        ("hta_sampled_128", "GPU", 128, {"all_gather": 1, "all_reduce": 2, "all_to_all": 2}),
        ("hta_mi250", "AMD Radeon Graphics", 1, {}),
        ("deepseek_h800", "NVIDIA H800", 64, {}),
    ],
)
def test_profiles_that_others_published_are_read(name, device, ranks, collectives, plans, imported):
    """None is of FSDP: all of their work is of no unit, and their collectives are beside the plan."""
    report = imported(PROFILES / "public" / f"{name}.json.gz", "--plan", plans["fsdp2"])
    kernels = {
        duration: own
        for duration, own in launched_in_steps(raw(f"public/{name}.json.gz")).items()
        if abs(duration - report["step_ns"]) <= 2
    }
    own = next(iter(kernels.values()))
    assert sum(stream["operations"] for stream in report["streams"]) == len(own)
    assert report["measured"]["device"] == device and report["world_size"] == ranks
    assert {entry["kind"]: entry["count"] for entry in report["collectives"]} == collectives
    assert report["measured"]["collectives_beside_plan"] == sum(collectives.values())
    assert sum(entry["time_ns"] for entry in report["activities"]) == report["step_ns"]
    compute = [k for k in own if not k["name"].startswith("nccl")]
    assert abs(
        sum(entry["busy_ns"] for entry in report["operators"]) - sum(1000 * k["dur"] for k in compute)
    ) <= 2 * len(compute)


def test_memory_is_that_of_torchs_statistics(plans, imported):
    report = imported(
        PROFILES / "fsdp2_rank0.json.gz", "--snapshot", PROFILES / "fsdp2_rank0.pickle.gz", "--plan", plans["fsdp2"]
    )
    assert report["memory"]["peak_bytes"] == 351_054_848 and report["memory"]["reserved_bytes"] == 473_956_352
    # Without a snapshot what the profiler followed itself stands for it: of the profiled steps, which are no more than
    # all.
    followed = imported(PROFILES / "fsdp2_rank0.json.gz", "--plan", plans["fsdp2"])["memory"]
    assert 0.9 * 351_054_848 < followed["peak_bytes"] <= 351_054_848


def test_time_that_one_rank_waits_for_the_other_is_apart(plans, imported):
    both = [PROFILES / f"fsdp2_rank{rank}.json.gz" for rank in (0, 1)]
    waits = [imported(*both, "--rank", rank, "--plan", plans["fsdp2"])["measured"] for rank in (0, 1)]
    assert [said["rank"] for said in waits] == [0, 1] and all(said["ranks"] == 2 for said in waits)
    assert all(0 < said["waiting_ns"] for said in waits)
    alone = imported(both[0], "--plan", plans["fsdp2"])
    assert alone["measured"].get("waiting_ns", 0) == 0
    assert waits[0]["waiting_ns"] < alone["communication_ns"]


def test_a_clock_that_is_off_changes_nothing(plans, imported, tmp_path):
    """Times of another machine's clock: the ends of the collectives set it."""
    document = json.loads(gzip.decompress((PROFILES / "fsdp2_rank1.json.gz").read_bytes()))
    for event in document["traceEvents"]:
        if "ts" in event:
            event["ts"] += 12_345_678.0
    later = tmp_path / "rank1.json"
    later.write_text(json.dumps(document))
    first = PROFILES / "fsdp2_rank0.json.gz"
    off, on = (imported(first, other, "--plan", plans["fsdp2"]) for other in (later, PROFILES / "fsdp2_rank1.json.gz"))
    assert abs(off["measured"]["waiting_ns"] - on["measured"]["waiting_ns"]) <= 20
    assert any("the clock of rank 1 was set by 12" in note for note in off["notes"])


def test_the_report_is_of_the_schema_and_the_same_each_time(plans, imported):
    arguments = (PROFILES / "fsdp2_rank0.json.gz", PROFILES / "fsdp2_rank1.json.gz", "--plan", plans["fsdp2"])
    report = imported(*arguments)
    jsonschema.validate(report, json.loads((ROOT / "schemas" / "json" / "report.schema.json").read_text()))
    assert report == imported(*arguments)


# ---- ranks recorded here ----


@pytest.fixture(scope="module")
def on_cpu(shardplan, tmp_path_factory):
    """(plan, folder of the profiles by kind) of two Gloo ranks."""
    from adapter_workers import run_on_ranks
    from profiled import BATCH, SEQUENCE, record

    folder = tmp_path_factory.mktemp("profiled")
    here = str(pathlib.Path(__file__).resolve().parent)
    done = shardplan(
        "trace", "profiled:profiled_gpt", "--batch", str(BATCH), "--seq", str(SEQUENCE), "--dtype", "float32", "-o",
        folder / "trace.json", cwd=here,
    )
    assert done.returncode == 0, done.stderr
    made = {}
    for policy in ("fsdp2", "fsdp1"):
        made[policy] = folder / f"{policy}.plan.json"
        done = shardplan(
            "plan", folder / "trace.json", "--cluster", "h200_8", "--ranks", "2", "--policy", policy, "--unit",
            "blocks.*", "--optimizer", "adamw", "-q", "-o", made[policy],
        )
        assert done.returncode == 0, done.stderr
    with plans_in(folder / "kept"):
        for kind, policy in (("fsdp2", "fsdp2"), ("fsdp1", "fsdp1"), ("plan", "fsdp2")):
            (folder / kind).mkdir()
            outcomes = run_on_ranks(2, folder / f"ranks-{kind}", record, kind, str(made[policy]), str(folder / kind))
            assert all(outcome and outcome[0] == "returned" for outcome in outcomes), outcomes
    return made, folder


@pytest.mark.parametrize(("kind", "policy"), [("fsdp2", "fsdp2"), ("fsdp1", "fsdp1"), ("plan", "fsdp2")])
def test_ranks_with_gloo(kind, policy, on_cpu, imported, shardplan):
    plans_made, folder = on_cpu
    report = imported(*sorted((folder / kind).glob("rank*.json.gz")), "--plan", plans_made[policy])
    simulated = json.loads(shardplan("simulate", plans_made[policy], "--report", "-", "-q").stdout)
    counts = {entry["kind"]: entry["count"] for entry in simulated["collectives"]}
    assert {entry["kind"]: entry["count"] for entry in report["collectives"]} == counts
    assert report["measured"]["device"] == "CPU" and len(report["measured"]["steps_ns"]) == 3
    assert all(unit["forward_ns"] > 0 and unit["backward_ns"] > 0 for unit in report["units"]), report["units"]
    assert report["forward_ns"] > 0 and report["backward_ns"] > 0 and report["optimizer_ns"] > 0
    assert report["forward_ns"] + report["backward_ns"] + report["optimizer_ns"] <= 1.01 * report["step_ns"]
    kinds = collections.Counter(entry["kind"] for entry in report["operators"])
    assert kinds["matmul"] == 2 and kinds["normalization"] == 2  # forward and backward


# ---- bad input ----


class Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["EVIL"],)


def damaged(tmp_path: pathlib.Path) -> dict[str, tuple[list, str]]:
    """Arguments in place of the profile, and what is said."""
    whole = (PROFILES / "fsdp2_rank0.json.gz").read_bytes()
    (tmp_path / "cut.json.gz").write_bytes(whole[: len(whole) // 2])
    text = gzip.decompress(whole)
    (tmp_path / "cut.json").write_bytes(text[: len(text) // 2])
    (tmp_path / "binary.json").write_bytes(b"\x80abc")
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "no_steps.json").write_bytes(text.replace(b"ProfilerStep#", b"Step "))
    (tmp_path / "odd.json").write_text('{"traceEvents": [{"ph": "X", "name": "a", "ts": "soon", "dur": 1}]}')
    (tmp_path / "empty.json").write_text('{"traceEvents": []}')
    (tmp_path / "list.pickle").write_bytes(pickle.dumps([1]))
    (tmp_path / "evil.pickle").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "cut.pickle").write_bytes(gzip.decompress((PROFILES / "fsdp2_rank0.pickle.gz").read_bytes())[:1000])
    good = PROFILES / "fsdp2_rank0.json.gz"
    return {
        "cut.json.gz": ([tmp_path / "cut.json.gz"], "the compressed data are not whole"),
        "cut.json": ([tmp_path / "cut.json"], "is the file whole?"),
        "binary.json": ([tmp_path / "binary.json"], "no text (found byte 0x80 at 0"),
        "other.json": ([tmp_path / "other.json"], "no traceEvents"),
        "no_steps.json": ([tmp_path / "no_steps.json"], "no steps (expected ranges ProfilerStep#N"),
        "odd.json": ([tmp_path / "odd.json"], "an event without a time"),
        "empty.json": ([tmp_path / "empty.json"], "nothing ran (found 0 spans"),
        "missing": ([tmp_path / "missing.json"], "cannot be read: No such file"),
        "twice": ([good, good], "rank 0 has two profiles"),
        "list.pickle": ([good, "--snapshot", tmp_path / "list.pickle"], "found list without segments"),
        "evil.pickle": ([good, "--snapshot", tmp_path / "evil.pickle"], "it names posix.mkdir"),
        "cut.pickle": ([good, "--snapshot", tmp_path / "cut.pickle"], "no memory snapshot"),
    }


def test_bad_input_is_named(plans, shardplan, tmp_path, monkeypatch):
    monkeypatch.setenv("EVIL", str(tmp_path / "made"))
    for name, (arguments, said) in damaged(tmp_path).items():
        output = tmp_path / "out.json"
        done = shardplan("import-profile", *arguments, "--plan", plans["fsdp2"], "-o", output, "-q")
        assert done.returncode == 3, (name, done.stderr)
        assert said in done.stderr and not output.exists(), (name, done.stderr)
    assert not (tmp_path / "made").exists()


def test_usage(plans, shardplan, tmp_path):
    good = PROFILES / "fsdp2_rank0.json.gz"
    copy = tmp_path / "rank0.json.gz"
    copy.write_bytes(good.read_bytes())
    for arguments, code, said in (
        ([good, "-o", "x.json"], 2, "--plan"),
        (
            [good, "--plan", plans["fsdp2"], "--rank", "5", "-o", tmp_path / "x.json"],
            2,
            "no profile of that rank (found 0)",
        ),
        ([copy, "--plan", plans["fsdp2"], "-o", copy], 2, "an output is a file that is read"),
        ([good, "--plan", plans["fsdp2"], "-o", tmp_path / "no" / "x.json"], 4, "cannot write"),
        ([good, "--plan", good, "-o", tmp_path / "x.json"], 3, ""),
    ):
        done = shardplan("import-profile", *arguments)
        assert done.returncode == code and said in done.stderr, (arguments, done.returncode, done.stderr)
    assert copy.read_bytes() == good.read_bytes()
