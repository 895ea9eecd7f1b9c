# SPDX-License-Identifier: Apache-2.0
"""Knobs of fsdp1 that change what is communicated and what buffers hold, in the plan of the three-layer example."""

import json

import pytest

EXAMPLE = "examples/three_layers"


@pytest.fixture
def plan(shardplan, root, tmp_path):
    """(trace, strategy without policy and units) -> the plan document; one unit per layer."""

    def make(trace: dict, **fields) -> dict:
        strategy = {"schema": "shardplan.strategy/1", "policy": "fsdp1", "units": [{"modules": ["layers.*"]}]}
        strategy |= {"optimizer": {"kind": "none"}, **fields}
        (tmp_path / "strategy.json").write_text(json.dumps(strategy))
        (tmp_path / "trace.json").write_text(json.dumps(trace))
        inputs = (tmp_path / "trace.json", "--cluster", root / EXAMPLE / "cluster.json")
        out = tmp_path / "plan.json"
        done = shardplan("plan", *inputs, "--strategy", tmp_path / "strategy.json", "-q", "-o", out)
        assert done.returncode == 0, done.stderr
        return json.loads(out.read_text())

    return make


@pytest.fixture
def trace(root) -> dict:
    return json.loads((root / EXAMPLE / "trace.json").read_text())


@pytest.fixture
def collectives(plan, trace):
    """(knobs of fsdp1, other fields of the strategy) -> by step, its collectives: (kind, dtype, reason)."""

    def of_steps(knobs: dict, **fields) -> list[list[tuple[str, str, str]]]:
        document = plan(trace, fsdp1=knobs, **fields)
        dtypes = {buffer["name"]: buffer["dtype"] for buffer in document["buffers"]}
        kinds = ("all_gather", "reduce_scatter", "all_reduce")
        return [
            [
                (i["kind"], dtypes[i.get("dst", i["src"])], i.get("reason", ""))
                for trigger in step["triggers"]
                for i in trigger["instructions"]
                if i["kind"] in kinds
            ]
            for step in document["steps"]
        ]

    return of_steps


def of_kind(step: list[tuple[str, str, str]], kind: str) -> list[str]:
    return [dtype for found, dtype, _ in step if found == kind]


@pytest.mark.parametrize(
    ("hook", "dtype"),
    [("fp16_compress_hook", "float16"), ("bf16_compress_hook", "bfloat16"), ("reduce_scatter_hook", "float32")],
)
def test_a_compressing_hook_reduces_in_its_own_dtype(collectives, hook, dtype):
    steps = collectives({"comm_hook": hook}, mixed_precision={"reduce_dtype": "float32"})
    assert of_kind(steps[-1], "reduce_scatter") == [dtype] * 3


def test_the_order_is_validated_in_the_first_step_only(collectives):
    """Each rank tells how many units it is about to gather, then which: two gathers before each unit's own."""
    first, steady = (
        [reason for kind, _, reason in step if kind == "all_gather"]
        for step in collectives({"validate_execution_order": True})
    )
    assert first[:9] == ["order_check", "order_check", "pre_forward"] * 3
    assert first.count("order_check") == 6 and "order_check" not in steady


def test_modules_in_evaluation_gather_in_full_precision_when_asked_to(collectives):
    program = [[{"call": "forward", "training": False}, {"call": "backward"}, {"call": "zero_grad"}]]
    low = {"mixed_precision": {"param_dtype": "float16"}, "program": program}
    assert set(of_kind(collectives({}, **low)[-1], "all_gather")) == {"float16"}
    full = collectives({"full_precision_in_eval": True}, **low)[-1]
    assert set(of_kind(full, "all_gather")) == {"bfloat16"} == set(of_kind(full, "reduce_scatter"))


def test_floating_buffers_get_the_dtype_of_their_unit(plan, trace):
    def buffer(fqn: str, dtype: str) -> dict:
        return {"fqn": fqn, "shape": [4], "dtype": dtype, "storage": 1_000_000 + len(buffers)}

    buffers: list[dict] = []
    for fqn, dtype in (("layers.0.table", "float32"), ("layers.0.count", "int64"), ("scale", "float32")):
        buffers.append(buffer(fqn, dtype))
    units = [
        {"modules": ["layers.*"], "mixed_precision": {"buffer_dtype": "bfloat16"}},
        {"modules": [""], "mixed_precision": {"buffer_dtype": "float16"}},
    ]
    found = plan(trace | {"buffers": buffers}, units=units)["model_buffers"]
    # The schema leaves out a dtype that is the default.
    assert [b.get("dtype", "float32") for b in found] == ["bfloat16", "int64", "float16"]
