"""Knobs of fsdp1 that change what is communicated, in the plan of the three-layer example."""

import json

import pytest

EXAMPLE = "examples/three_layers"


@pytest.fixture
def collectives(shardplan, root, tmp_path):
    """(knobs of fsdp1, other fields of the strategy) -> by step, its collectives: (kind, dtype, reason)."""

    def plan(knobs: dict, **fields) -> list[list[tuple[str, str, str]]]:
        strategy = {"schema": "shardplan.strategy/1", "policy": "fsdp1", "units": [{"modules": ["layers.*"]}]}
        strategy |= {"optimizer": {"kind": "none"}, "fsdp1": knobs, **fields}
        (tmp_path / "strategy.json").write_text(json.dumps(strategy))
        out = tmp_path / "plan.json"
        where = root / EXAMPLE
        inputs = (where / "trace.json", "--cluster", where / "cluster.json", "--strategy", tmp_path / "strategy.json")
        done = shardplan("plan", *inputs, "-q", "-o", out)
        assert done.returncode == 0, done.stderr
        document = json.loads(out.read_text())
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

    return plan


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
