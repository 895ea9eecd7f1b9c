# SPDX-License-Identifier: Apache-2.0
"""Every command verifies the plans that it uses. An edited one is refused with the verifier's words. One that carries a
fault of PyTorch's is used with a warning, and the fault cannot hide anything else."""

import copy
import json

import pytest
from conftest import ROOT, build_folder

TRACE = ROOT / "tests" / "planner" / "goldens" / "traces" / "small.json"
USES = {
    "simulate": ("simulate",),
    "memory": ("memory",),
    "explain-memory": ("explain-memory",),
    "explain": ("explain",),
    "run": ("run", "--device", "virtual"),
}
HAS_EXECUTOR = (build_folder() / "bin" / "shardplan-run").exists()


def planned(shardplan, folder, *flags):
    path = folder / "plan.json"
    made = shardplan("plan", TRACE, "-q", "-o", path, *flags)
    assert made.returncode == 0, made.stderr
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def good(shardplan, tmp_path_factory):
    return planned(
        shardplan, tmp_path_factory.mktemp("good"), "--ranks", "2", "--policy", "fsdp2", "--unit", "layers.*"
    )


@pytest.fixture(scope="module")
def faulty(shardplan, tmp_path_factory):
    """FSDP1's hybrid sharding over one rank."""
    flags = ("--policy", "fsdp1", "--sharding", "hybrid_shard", "--mesh", "replicate=2", "shard=1")
    return planned(shardplan, tmp_path_factory.mktemp("faulty"), *flags)


def places(plan, kind):
    """Places of all instructions of that kind in the step that repeats."""
    triggers = plan["steps"][-1]["triggers"]
    return [
        (t, i)
        for t, trigger in enumerate(triggers)
        for i, one in enumerate(trigger["instructions"])
        if one["kind"] == kind
    ]


def without(plan, place):
    edited = copy.deepcopy(plan)
    del edited["steps"][-1]["triggers"][place[0]]["instructions"][place[1]]
    return edited


def uses(shardplan, plan, folder, *flags):
    """The words of each command about the plan."""
    path = folder / "edited.json"
    path.write_text(json.dumps(plan))
    return {
        name: shardplan(*words, path, *flags) for name, words in USES.items() if name != "run" or HAS_EXECUTOR
    } | {"validate": shardplan("validate", path)}


KINDS = ("wait", "free", "copy_in", "copy_out", "all_gather", "grad_copy_in", "reduce_scatter", "optimizer_step")


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_without_an_instruction_is_used_only_where_it_verifies(shardplan, good, tmp_path, kind):
    found = places(good, kind)
    assert found
    refused = 0
    for place in (found[0], found[-1]):
        said = uses(shardplan, without(good, place), tmp_path)
        code = said.pop("validate").returncode
        refused += code
        for name, result in said.items():
            assert result.returncode == code, f"{name} of a plan without {kind} at {place}: {result.stderr}"
            if code == 1:
                assert (
                    "/steps/" in result.stderr and "does not verify" in result.stderr and "--no-verify" in result.stderr
                )
    assert refused or kind == "optimizer_step"


def test_a_sum_in_place_of_an_average_is_refused(shardplan, good, tmp_path):
    edited = copy.deepcopy(good)
    (t, i), *_ = places(edited, "reduce_scatter")
    instruction = edited["steps"][-1]["triggers"][t]["instructions"][i]
    assert instruction.pop("reduce_op") == "average"
    for name, result in uses(shardplan, edited, tmp_path).items():
        assert result.returncode == 1 and "grad_division" in result.stdout + result.stderr, name


def test_no_verify_uses_a_broken_plan_and_warns(shardplan, good, tmp_path):
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(without(good, places(good, "copy_out")[0])))
    for command in ("simulate", "memory"):
        result = shardplan(command, path, "--no-verify")
        assert result.returncode == 0 and "warning" in result.stderr and "not verified" in result.stderr


def test_a_good_plan_carries_nothing(good):
    assert "known_faults" not in good and "program" not in good["digests"]


def test_a_carried_fault_is_a_warning(shardplan, faulty, tmp_path):
    assert {fault["fault"] for fault in faulty["known_faults"]} == {"fsdp1_replicas_not_added"}
    for name, result in uses(shardplan, faulty, tmp_path).items():
        said = result.stdout + result.stderr
        assert "takes that rank for all" in said and "grad_division" in said, name
        if name != "run":  # whose schedule does what the fault is
            assert result.returncode == 0, f"{name}: {result.stderr}"


def drop_one(plan):
    del plan["known_faults"][0]


def drop_all(plan):
    del plan["known_faults"]


def add_one(plan):
    plan["known_faults"].append({**plan["known_faults"][0], "rule": "leak", "fault": "fsdp1_kept_unused"})


def another_place(plan):
    plan["known_faults"][0]["instruction"] += 1


def another_kind(plan):
    plan["known_faults"][0]["fault"] = "fsdp1_lost_gradient"


def another_policy(plan):
    for fault in plan["known_faults"]:
        fault["fault"] = "fsdp2_divided_twice"


def another_program(plan):
    """No rule is broken by it, and yet which violations are PyTorch's is known no longer."""
    plan["steps"][0]["triggers"][0]["instructions"].append(
        {"kind": "record", "event": plan["events"][0], "stream": "compute"}
    )


def another_digest(plan):
    plan["digests"]["program"] = plan["digests"]["trace"]


@pytest.mark.parametrize(
    "edit", (drop_one, drop_all, add_one, another_place, another_kind, another_policy, another_program, another_digest)
)
def test_what_is_carried_has_to_be_what_is_found(shardplan, faulty, tmp_path, edit):
    plan = copy.deepcopy(faulty)
    edit(plan)
    for name, result in uses(shardplan, plan, tmp_path).items():
        assert result.returncode == 1, f"{name}: {result.stdout}{result.stderr}"


def test_an_unknown_fault_is_bad_input(shardplan, faulty, tmp_path):
    plan = copy.deepcopy(faulty)
    plan["known_faults"][0]["fault"] = "whatever"
    for name, result in uses(shardplan, plan, tmp_path).items():
        assert result.returncode == 3 and "/known_faults/0/fault" in result.stderr, name


def test_faults_survive_the_text_form(shardplan, faulty, tmp_path):
    path, text = tmp_path / "plan.json", tmp_path / "plan.txt"
    path.write_text(json.dumps(faulty))
    text.write_text(shardplan("show", path).stdout)
    assert json.loads(shardplan("show", text, "--json").stdout)["known_faults"] == faulty["known_faults"]
    assert shardplan("simulate", text).returncode == 0
