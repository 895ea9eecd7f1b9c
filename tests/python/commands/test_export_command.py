# SPDX-License-Identifier: Apache-2.0
"""`shardplan export` as a command: what it says that FSDP2 lacks, what that costs, and what it refuses."""

import json
import re

import pytest
from conftest import ROOT

TRACE = ROOT / "examples" / "three_layers" / "trace.json"
JOB = [TRACE, "--cluster", "h100", "--ranks", "8", "--unit", "layers.*"]
OVER_ALL = {"shard": ["shard"]}
COST = re.compile(
    r"These calls cost ([-+][\d.]+) ms and ([-+][\d.]+) GiB beside the plan \(simulated: ([\d.]+) ms, ([\d.]+) GiB of "
    r"the device\)\."
)


def planned(shardplan, folder, *flags, name="plan.json"):
    result = shardplan("plan", *JOB, *flags, "-q", "-o", folder / name)
    assert result.returncode == 0, result.stderr
    return folder / name


def exported(shardplan, plan, *flags):
    script = plan.with_suffix(".py")
    return shardplan("export", plan, "--fsdp2", "-q", "-o", script, *flags), script


def with_strategy(plan, **fields):
    document = json.loads(plan.read_text())
    document["strategy"].update(fields)
    plan.write_text(json.dumps(document))
    return plan


def step_ms(shardplan, plan):
    report = plan.with_suffix(".report.json")
    assert shardplan("simulate", plan, "-q", "--report", report).returncode == 0
    return json.loads(report.read_text())["step_ns"] / 1e6


def test_the_terminal_and_the_docstring_say_the_same(shardplan, tmp_path):
    result, script = exported(shardplan, planned(shardplan, tmp_path))
    assert result.returncode == 0 and "Plain FSDP2 has a call for each setting of the plan." in result.stdout
    assert result.stdout.strip() in script.read_text().split('"""')[1]
    compile(script.read_text(), str(script), "exec")
    assert exported(shardplan, planned(shardplan, tmp_path))[1].read_bytes() == script.read_bytes()


@pytest.mark.parametrize(
    ("flags", "place"),
    [(["--backward-prefetch", "0"], "/strategy/fsdp2/backward_prefetch"), (["--policy", "fsdp1"], "/strategy/policy"),
     (["--policy", "fsdp1", "--sharding", "shard_grad_op", "--param-dtype", "bfloat16"], "/strategy/policy"),
     (["--pytorch", "2.11", "--separate-reduce-scatter"], "/strategy/fsdp2/separate_reduce_scatter_communicator")],
)  # fmt: skip
def test_what_fsdp2_lacks_is_told_with_its_cost(shardplan, tmp_path, flags, place):
    plan = planned(shardplan, tmp_path, *flags)
    result, script = exported(shardplan, plan)
    assert result.returncode == 0 and place in result.stdout and "export with --trace" in result.stdout, result.stderr
    result, script = exported(shardplan, plan, "--trace", TRACE)
    assert result.returncode == 0 and place in script.read_text(), result.stderr
    found = COST.search(result.stdout)
    if found is None:  # the schedules of a small model may be one
        assert "instruction for instruction" in result.stdout
        return
    assert float(found[3]) - float(found[1]) == pytest.approx(step_ms(shardplan, plan), abs=0.002)


def test_an_edited_plan_is_told_from_its_strategy(shardplan, tmp_path):
    plan = with_strategy(planned(shardplan, tmp_path), reshard_after_forward=False)
    result, script = exported(shardplan, plan, "--trace", TRACE)
    assert result.returncode == 0 and "The plan was edited" in result.stdout and COST.search(result.stdout), (
        result.stdout
    )
    kept = step_ms(shardplan, planned(shardplan, tmp_path, "--reshard-after-forward", "false", name="kept.json"))
    assert float(COST.search(result.stdout)[3]) == pytest.approx(kept, abs=0.002)
    assert "reshard_after_forward=False" in script.read_text()


def test_settings_of_the_allocator_are_there_before_its_first_allocation(shardplan, tmp_path):
    _, script = exported(shardplan, planned(shardplan, tmp_path, "--alloc-conf", "expandable_segments:True"))
    assert 'os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")' in script.read_text()


@pytest.mark.parametrize(
    ("change", "flags", "code", "words"),
    [
        ({}, ["--policy", "fsdp1", "--sharding", "no_shard"], 1, "/strategy/fsdp1/sharding: no_shard"),
        (
            {"mixed_precision": {"param_dtype": "bfloat16", "keep_param_dtype": ["layers.0.weight"]}},
            [],
            3,
            "/strategy/mixed_precision/keep_param_dtype",
        ),
        ({"fsdp2": {"all_reduce_hooks": [{"divide": 2.0}]}}, [], 3, "/strategy/fsdp2/all_reduce_hooks"),
        (
            {"data_parallel": OVER_ALL, "units": [{"modules": ["layers.*"], "parameter_meshes": [
                {"parameters": ["layers.0.weight"], "data_parallel": OVER_ALL}]}]},
            [],
            3,
            "/strategy/units/0/parameter_meshes/0/data_parallel",
        ),
    ],
)
def test_what_it_is_not_written_for_is_refused_with_its_place(shardplan, tmp_path, change, flags, code, words):
    plan = with_strategy(planned(shardplan, tmp_path, *flags), **change)
    result, script = exported(shardplan, plan)
    assert (
        result.returncode == code
        and words in result.stderr
        and str(plan) in result.stderr
        or code == 1
        and words in result.stderr
    ), result.stderr
    assert not script.exists()


def test_wrong_usage_and_inputs(shardplan, tmp_path):
    plan = planned(shardplan, tmp_path)
    assert shardplan("export", plan, "-o", tmp_path / "out.py").returncode == 2
    assert shardplan("export", plan, "--fsdp2", "-o", plan).returncode == 2
    assert shardplan("export", tmp_path / "none.json", "--fsdp2", "-o", tmp_path / "out.py").returncode == 3
    other = shardplan(
        "export", plan, "--fsdp2", "--trace", ROOT / "tests" / "planner" / "goldens" / "traces" / "small.json", "-o",
        tmp_path / "out.py",
    )
    assert other.returncode == 3 and "/digests/trace" in other.stderr and "another trace" in other.stderr
    assert shardplan("export", plan, "--fsdp2", "-o", tmp_path / "no" / "folder.py").returncode == 4
    assert not (tmp_path / "out.py").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ["--policy", "fsdp1"],
        ["--allow", "policy"],
        ["--backward-prefetch", "0"],
        ["--pytorch", "2.11", "--separate-reduce-scatter"],
    ],
)
def test_optimize_refuses_jobs_that_the_file_could_not_say(shardplan, tmp_path, flags):
    result = shardplan(
        "optimize", *JOB, "--memory-budget", "device", "--expressible", "fsdp2", *flags, "-q", "-o",
        tmp_path / "plan.json",
    )
    assert result.returncode == 2 and "--expressible fsdp2" in result.stderr, result.stderr


def test_optimize_decides_what_the_file_can_say(shardplan, tmp_path):
    """With micro-batches the search likes reductions in two levels, and parts that stay between them: PyTorch has
    neither."""
    job = [
        TRACE, "--cluster", "h100_sxm_64_100g", "--ranks", "16", "--accumulate", "4", "--memory-budget", "0.9GiB", "-q",
    ]
    said = {}
    for name, flags in {
        "free": [], "in one level": ["--fix", "reduction"], "expressible": ["--expressible", "fsdp2"],
    }.items():
        plan = tmp_path / f"{name}.json"
        result = shardplan("optimize", *job, *flags, "-o", plan)
        assert result.returncode == 0, result.stderr
        said[name] = exported(shardplan, plan, "--trace", TRACE)[0].stdout
    assert "instruction for instruction" in said["expressible"], said
    for name, knob in {"free": "inner_reduce_ranks", "in one level": "part_after_backward"}.items():
        assert knob in said[name] and COST.search(said[name]), said[name]
