# SPDX-License-Identifier: Apache-2.0
"""shardplan.plan: plans by a script."""

import json
import pathlib
import re
import sys

import pytest
from conftest import ROOT, build_folder
from shardplan import plan

EXAMPLE = ROOT / "examples" / "three_layers"
sys.path.append(str(ROOT / "examples" / "plan_by_script"))
import own_schedule  # noqa: E402


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    monkeypatch.setenv("SHARDPLAN_PROGRAMS", str(build_folder() / "bin"))


def new(**words) -> plan.Builder:
    return plan.new(EXAMPLE / "trace.json", cluster=EXAMPLE / "cluster.json", units=["layers.*"], **words)


def test_a_new_plan_has_what_the_model_does_and_nothing_else():
    builder = new(name="mine", flags=["--accumulate", "3"])
    document = builder.build().document
    kinds = {i["kind"] for step in document["steps"] for trigger in step["triggers"] for i in trigger["instructions"]}
    assert kinds == {"compute", "optimizer_step", "zero_grad", "allocate", "free"}
    roles = {
        builder.buffers[i.get("dst") or i["src"]]["role"]
        for step in document["steps"]
        for t in step["triggers"]
        for i in t["instructions"]
        if i["kind"] in ("allocate", "free")
    }
    assert roles == {"optimizer_state", "optimizer_temp"}
    assert (builder.streams, document["policy"], document["strategy"]["policy"]) == (["compute"], "mine", "mine")
    computed = [
        i.get("microbatch", 0)
        for t in document["steps"][-1]["triggers"]
        for i in t["instructions"]
        if i["kind"] == "compute" and t["kind"] == "pre_forward"
    ]
    assert computed == [0, 0, 0, 1, 1, 1, 2, 2, 2], "repetitions are written out"
    violations = builder.build().verify()
    assert violations and all(re.match("[a-z_]+: ", violation) for violation in violations)
    assert violations[0].startswith("use_before_unshard: ")


@pytest.mark.parametrize(
    "flags",
    [[], ["--param-dtype", "bfloat16"], ["--optimizer", "sgd", "--ranks", "4"]],
    ids=["plain", "bfloat16", "4 ranks"],
)
def test_the_example_verifies_and_simulates(flags, tmp_path):
    builder = new(flags=flags)
    own_schedule.schedule(builder)
    made = builder.build()
    assert made.verify() == []
    report = made.simulate()
    assert report["policy"] == "script" and report["step_ns"] > 0 and report["memory"]["peak_bytes"] > 0
    made.save(tmp_path / "plan.json")
    again = plan.read(tmp_path / "plan.json")
    assert again.verify() == [] and again.simulate() == report


def test_a_schedule_that_forgets_accumulation_is_told_so():
    builder = new(flags=["--accumulate", "2"])
    own_schedule.schedule(builder)
    violations = builder.build().verify()
    assert {violation.split(":")[0] for violation in violations} == {"grad_not_reduced"}
    assert "layers.2.grad_sharded, and the gradient in it is lost" in violations[0]


def test_a_plan_of_the_planner_is_edited(shardplan, tmp_path):
    path = tmp_path / "plan.json"
    shardplan(
        "plan", EXAMPLE / "trace.json", "--cluster", EXAMPLE / "cluster.json", "--unit", "layers.*", "-q", "-o", path
    )
    before = plan.read(path)
    spare = before.edit("spare")
    spare.at("pre_forward", "layers.1", step="steady").remove("wait", event="layers.0.copy_out", stream="all_gather")
    assert spare.build().verify() == [], "another event orders the two"
    assert before.verify() == [] and before.document["policy"] == "fsdp2", "the plan that was read stays as it is"
    broken = before.edit()
    broken.at("pre_forward", "layers.1", step="steady").remove("wait", event="layers.1.all_gather")
    (violation, *_) = broken.build().verify()
    assert violation.startswith("read_before_write: copy_out on compute reads layers.1.all_gather_output")
    with pytest.raises(plan.PlanError, match="read_before_write"):
        broken.build().simulate()


def test_instructions_go_before_what_the_model_does_or_behind_it():
    builder = new()
    place = builder.at("pre_forward", "layers.0").record("a", stream="compute").record("b", stream="compute")
    place.after().record("c", stream="compute")
    assert [i.get("event", i["kind"]) for i in place.instructions()] == ["a", "b", "compute", "c"]
    step = builder.at("optimizer_step").record("d", stream="compute").instructions()
    assert step[0] == {"kind": "record", "event": "d", "stream": "compute", "reason": "script"}, (
        "before the states are allocated"
    )


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda b: b.at("before_forward"), "there is no trigger 'before_forward'; expected backward_end, "),
        (
            lambda b: b.at("pre_forward", "layers.7"),
            r"there is no unit 'layers.7'; expected \(root\), layers.0, layers.1, layers.2",
        ),
        (
            lambda b: b.at("post_backward", "layers.0"),
            "there is no trigger 'post_backward' of 'layers.0'; expected one of layers.1, layers.2",
        ),
        (
            lambda b: b.at("pre_forward", "layers.0", microbatch=3),
            "there is no trigger 'pre_forward' with microbatch 3; expected 0",
        ),
        (lambda b: b.at("pre_forward", step="third"), "there is no step 'third'; expected first, steady"),
        (
            lambda b: b.at("step_end").allocate("layers.0.gathered"),
            "dst: there is no buffer 'layers.0.gathered'; expected layers.0.all_gather_output, ",
        ),
        (
            lambda b: b.at("step_end").allocate("layers.0.param_unsharded", stream="gather"),
            "stream: there is no stream 'gather'; expected compute",
        ),
        (lambda b: b.at("step_end").wait("done", stream="compute"), "event: there is no event 'done'; expected "),
        (
            lambda b: b.at("step_end").all_gather(
                "layers.0.all_gather_output", "layers.0.all_gather_output", communicator="x"
            ),
            "communicator: there is no communicator 'x'; expected shard",
        ),
        (
            lambda b: b.at("step_end").all_reduce("layers.0.grad_sharded"),
            "communicator: unit 'layers.0' has no replicate_communicator",
        ),
        (lambda b: b.at("step_end").remove("copy_in"), "there is no instruction 'copy_in'"),
        (lambda b: b.add_stream("compute"), "there is a stream 'compute' already"),
        (
            lambda b: b.add_buffer("layers.0.param_sharded", role="param_sharded"),
            "there is a buffer 'layers.0.param_sharded' already",
        ),
        (lambda b: b.add_buffer("x", role="param_sharded", unit="layers.9"), "there is no unit 'layers.9'"),
    ],
)
def test_names_that_there_are_not(use, says):
    with pytest.raises(plan.PlanError, match=says):
        use(new())


def test_what_is_no_plan_is_refused_in_the_readers_words():
    builder = new()
    builder.add_buffer("x", role="no_role", dtype="float32", parts_bytes=[4])
    with pytest.raises(plan.PlanError, match="the plan: /buffers/.*/role: unknown value"):
        builder.build().verify()
    with pytest.raises(plan.PlanError, match="there is no such file|cannot"):
        plan.read("missing.json")
    with pytest.raises(plan.PlanError, match="--cluster|missing"):
        plan.new(EXAMPLE / "trace.json", cluster="missing.json")


def test_there_is_a_method_for_each_instruction_of_a_schedule():
    """The table of docs/reference/plan-format.md, which is made of the instruction set."""
    table = (
        (ROOT / "docs" / "reference" / "plan-format.md")
        .read_text()
        .split("## Instructions")[1]
        .split("## Procedures")[0]
    )
    kinds = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    # issue("grad_zero", ...)
    of_others = {
        "compute", "optimizer_step", "zero_grad", "grad_zero", "copy_to_host", "copy_to_device", "reshard_post_forward",
        "update_copy_in", "all_to_all", "update_gather", "orthogonalize", "update_apply",
    }
    assert kinds - of_others == {name for name in vars(plan.Place) if name in kinds}


def test_the_example_prints_the_same_document_twice(tmp_path):
    texts = []
    for name in ("a", "b"):
        own_schedule.main(str(EXAMPLE / "trace.json"), str(EXAMPLE / "cluster.json"), str(tmp_path / name))
        texts.append(pathlib.Path(tmp_path / name).read_bytes())
    assert texts[0] == texts[1] and json.loads(texts[0])["policy"] == "last_layer_stays"
