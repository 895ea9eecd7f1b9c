# SPDX-License-Identifier: Apache-2.0
"""Builders that call fully_shard: the plan of the strategy that the tracer writes has the units that PyTorch's own
fully_shard makes of the same builder."""

import json
import math
import pathlib
import subprocess

import pytest
import warm
from conftest import build_folder
from test_tracer_distributed import COMMAND, HERE

SHARDPLAN = build_folder() / "bin" / "shardplan"
BUILDERS = (
    "plain", "reading", "without_mesh", "without_root", "hybrid", "nested", "placed", "on_meshes", "tensor_parallel",
    "checkpointed", "chunked",
)


def traced(builder, folder, *flags):
    """The trace, the strategy; or what the command said."""
    trace, strategy = folder / f"{builder}.json", folder / f"{builder}.strategy.json"
    words = [f"sharded_builders:{builder}", "-q", "-o", trace, "--strategy", strategy, "--batch", "2", "--seq", "16"]
    done = warm.run(["-c", COMMAND, *words, *flags], cwd=HERE, timeout=600)
    return done, trace, strategy


def planned(trace, strategy, folder):
    plan = folder / "plan.json"
    done = subprocess.run(
        [SHARDPLAN, "plan", trace, "--strategy", strategy, "--cluster", "h100_sxm_8", "-q", "-o", plan],
        capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(plan.read_text())


def real(*words):
    done = warm.run([pathlib.Path(HERE) / "real_units.py", *words], cwd=HERE, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def units_of(plan):
    """The form of real_units.py, without prefetches."""
    sizes = {entry["name"]: entry.get("size", 1) for entry in plan["communicators"]}
    sizes |= {
        entry["name"]: math.prod(dim["size"] for dim in entry["dims"])
        for entry in plan["communicators"] if entry.get("dims")
    }
    found = {}
    for unit in plan["units"]:
        found.setdefault(",".join(unit["modules"]), []).append(
            {
                "parameters": {p["fqn"]: p.get("shard_dim", 0) for p in unit["parameters"]},
                "shards": sizes.get(unit.get("shard_communicator"), 1),
                "replicas": sizes.get(unit.get("replicate_communicator"), 1),
                "param_dtype": unit["param_dtype"],
            }
        )
    return {modules: [group for group in groups if group["parameters"]] for modules, groups in found.items()}


def compare(plan, strategy, expected):
    found = units_of(plan)
    assert found.keys() == expected.keys()
    for modules, state in expected.items():
        groups = [{name: group[name] for name in ("parameters", "shards", "replicas")} for group in state["groups"]]
        mine = [{name: group[name] for name in ("parameters", "shards", "replicas")} for group in found[modules]]
        assert mine == groups, modules
        for group, own in zip(state["groups"], found[modules]):
            assert group["param_dtype"] in ("None", own["param_dtype"])
    knobs = strategy.get("fsdp2", {})
    for kind in ("forward_prefetch", "backward_prefetch"):
        wanted = {modules.partition(",")[0]: [name.partition(",")[0] for name in state[kind]]
                  for modules, state in expected.items() if state[kind]}
        assert {entry["unit"]: entry["prefetch"] for entry in knobs.get(f"{kind}_lists", [])} == wanted
    divides = {group["divides"] for state in expected.values() for group in state["groups"]}
    assert divides == {knobs.get("gradient_divide_factor")}


@pytest.mark.parametrize("builder", BUILDERS)
def test_the_units_are_those_that_fully_shard_makes(builder, tmp_path):
    done, trace, strategy = traced(builder, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    compare(planned(trace, strategy, tmp_path), json.loads(strategy.read_text()), real(builder))


def test_the_trace_is_of_the_model_before(tmp_path):
    done, trace, _ = traced("plain", tmp_path)
    unsharded = tmp_path / "bare.json"
    words = ["sharded_builders:unsharded", "-q", "-o", unsharded, "--batch", "2", "--seq", "16"]
    bare = warm.run(["-c", COMMAND, *words], cwd=HERE, timeout=600)
    assert done.returncode == 0 and bare.returncode == 0, bare.stderr
    one, other = json.loads(trace.read_text()), json.loads(unsharded.read_text())
    for name in ("modules", "parameters", "forwards", "backwards"):
        assert one[name] == other[name]


def test_checkpoints_are_the_strategys(tmp_path):
    done, trace, strategy = traced("checkpointed", tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(strategy.read_text())["checkpoint"] == {
        "modules": ["layers.0", "layers.1", "layers.2"], "early_stop": False,
    }
    assert not any("_checkpoint" in module["fqn"] for module in json.loads(trace.read_text())["modules"])


def test_a_selective_policy_is_asked_what_it_keeps(tmp_path):
    done, _, strategy = traced("selective", tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(strategy.read_text())["checkpoint"]["save"] == [{"name": "aten.addmm", "recompute_every": 2}]


def test_checkpoints_that_no_strategy_says_stay_in_the_model(tmp_path):
    done, trace, strategy = traced("by_shape", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "checkpoint" not in json.loads(strategy.read_text())
    found = json.loads(trace.read_text())
    assert not any("_checkpoint" in module["fqn"] for module in found["modules"])
    assert any(event[0] == "recompute_enter" for entry in found["backwards"] for event in entry["events"])


def test_calls_of_the_step_are_in_the_program(tmp_path):
    done, _, strategy = traced("chunked", tmp_path)
    assert done.returncode == 0, done.stderr
    program = json.loads(strategy.read_text())["program"][0]
    assert [call.get("method", call["call"]) for call in program] == [
        "forward", "set_reshard_after_forward", "set_requires_gradient_sync", "unshard", "forward", "backward",
        "set_requires_gradient_sync", "forward", "backward", "reshard", "forward", "backward", "optimizer_step",
        "zero_grad",
    ]
    assert program[2] == {
        "call": "module", "method": "set_requires_gradient_sync", "module": "head", "recurse": False, "value": False,
    }


@pytest.mark.parametrize(
    "builder, flags, code, said",
    [
        ("hooked", (), 3, "set_all_reduce_hook, which a strategy document cannot say"),
        ("unsharded", (), 3, "never calls fully_shard"),
    ],
)
def test_what_a_strategy_cannot_say_ends_with_its_name(builder, flags, code, said, tmp_path):
    done, trace, strategy = traced(builder, tmp_path, *flags)
    assert done.returncode == code and said in done.stderr
    assert not trace.exists() and not strategy.exists()


def test_a_trace_without_a_strategy_says_that_there_is_one(tmp_path):
    words = ["sharded_builders:plain", "-q", "-o", tmp_path / "trace.json"]
    done = warm.run(["-c", COMMAND, *words], cwd=HERE, timeout=600)
    assert done.returncode == 0 and "--strategy FILE has them" in done.stderr


def test_a_config_has_no_strategy(tmp_path):
    config = tmp_path / "config.json"
    config.write_text("{}")
    done = warm.run(["-c", COMMAND, config, "-q", "-o", tmp_path / "t.json", "--strategy", tmp_path / "s.json"],
                    cwd=HERE, timeout=600)
    assert done.returncode == 2 and "--strategy is for a callable" in done.stderr
