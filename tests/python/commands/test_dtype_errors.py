# SPDX-License-Identifier: Apache-2.0
"""A dtype that the step fails with is said when planning: `shardplan plan` against a step of the installed torch on two
ranks (dtype_errors.py)."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import warm
from conftest import ROOT, build_folder, free_port
from dtype_errors import HELD

COMMAND = build_folder() / "bin" / "shardplan"
HERE = pathlib.Path(__file__).parent
POLICIES = ("fsdp2", "fsdp1")
REAL = ("float64", "float32", "bfloat16", "float16")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "bool", "uint16")
COMPLEX = ("complex64", "complex128", "complex32")
OPTIMIZERS = (
    "adamw-forloop", "adamw-foreach", "adamw-fused", "adam-foreach", "sgd-forloop", "sgd-foreach", "sgd-fused",
    "adafactor-forloop",
)
KEPT = [
    ("full_shard", "bfloat16", "float32"),
    ("full_shard", "bfloat16", ""),
    ("full_shard", "", "bfloat16"),
    ("no_shard", "bfloat16", "float32"),
    ("no_shard", "bfloat16", ""),
    ("no_shard", "", "bfloat16"),
    ("shard_grad_op", "bfloat16", ""),
]

CASES = [
    *(("reduce", policy, name) for policy in POLICIES for name in (*REAL, *FLOAT8, *INTEGERS, *COMPLEX)),
    *(("param", policy, name) for policy in POLICIES for name in (*REAL, *FLOAT8, *INTEGERS)),
    *(("output", name) for name in (*REAL, *INTEGERS)),
    *(("held", policy, name) for policy in POLICIES for name in HELD),
    # NCCL gathers these dtypes, Gloo does not.
    *(("alone", policy, name) for policy in POLICIES for name in HELD if name != "float8_e4m3fn"),
    *(("keep", optimizer, *kept) for optimizer in OPTIMIZERS for kept in KEPT),
]


def program(*arguments):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tools/python'}:{HERE}", "OMP_NUM_THREADS": "1"}
    return warm.Program([HERE / "dtype_errors.py", *arguments], env=environment, cwd=HERE)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(what torch said, by case; the folder of the traces)"""
    folder = tmp_path_factory.mktemp("traces")
    names = ["plain", *(f"{kind}_{name}" for kind in ("held", "alone") for name in HELD)]
    real, traces = program(str(free_port()), *(":".join(case) for case in CASES)), program("--traces", folder, *names)
    (printed, said), (_, refused) = real.communicate(), traces.communicate()
    assert traces.returncode == 0, refused[-3000:]
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{"case"')]
    assert len(lines) == len(CASES), said[-3000:]
    return {tuple(line["case"].split(":")): line["error"] for line in lines}, folder


def planned(folder, trace, strategy, *arguments):
    units = [{"modules": ["layers.*"]}, {"modules": [""], **strategy.pop("of_root", {})}]
    path, out = folder / "strategy.json", folder / "plan.json"
    path.write_text(
        json.dumps({"schema": "shardplan.strategy/1", "units": units, "optimizer": {"kind": "sgd"}, **strategy})
    )
    return subprocess.run(
        [COMMAND, "plan", folder / f"{trace}.json", "--strategy", path, "--ranks", "2", "-q", "-o", out, *arguments],
        capture_output=True,
        text=True,
    )


def strategy_of(kind, *arguments):
    """(trace, strategy) of a case."""
    if kind == "keep":
        optimizer, sharding, param, reduce = arguments
        dtypes = {"param_dtype": param, "reduce_dtype": reduce, "keep_low_precision_grads": True}
        name, how = optimizer.split("-")
        return "plain", {
            "policy": "fsdp1",
            "fsdp1": {"sharding": sharding},
            "mixed_precision": {field: value for field, value in dtypes.items() if value},
            "optimizer": {"kind": name, "implementation": {"forloop": "for_loop"}.get(how, how)},
        }
    policy, dtype = ("fsdp2", *arguments)[-2:]
    mixed = {"reduce": {"param_dtype": "bfloat16", "reduce_dtype": dtype}, "param": {"param_dtype": dtype}}
    if kind == "output":
        return "plain", {"policy": "fsdp2", "of_root": {"mixed_precision": {"output_dtype": dtype}}}
    trace = "plain" if kind in mixed else f"{kind}_{dtype}"
    return trace, {"policy": policy, **({"mixed_precision": mixed[kind]} if kind in mixed else {})}


@pytest.mark.parametrize("case", CASES, ids=":".join)
def test_a_plan_is_refused_where_torch_fails(case, made):
    said, folder = made
    done = planned(folder, *strategy_of(*case))
    assert done.returncode == (3 if said[case] else 0), f"torch: {said[case] or 'works'}; shardplan: {done.stderr}"
    if said[case]:
        assert ("PyTorch fails here" in done.stderr or "differ in dtype" in done.stderr) and len(
            done.stderr.strip().splitlines()
        ) == 1, done.stderr


def test_the_error_has_the_place_what_is_there_and_what_could_be(made):
    done = planned(made[1], *strategy_of("reduce", "fsdp2", "int32"))
    for words in ("/mixed_precision/reduce_dtype", "the root", "int32", "bfloat16 or float16"):
        assert words in done.stderr, done.stderr
    done = planned(made[1], *strategy_of("keep", "adamw-foreach", *KEPT[0]))
    for words in ("/optimizer", "expected dtype float32", "bfloat16", "keep_low_precision_grads", "sgd"):
        assert words in done.stderr, done.stderr


def test_a_flag_is_checked_like_a_strategy(made):
    done = subprocess.run(
        [
            COMMAND, "plan", made[1] / "plain.json", "--ranks", "2", "--reduce-dtype", "float8_e5m2", "-o",
            made[1] / "p.json",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3 and "float8_e5m2" in done.stderr, done.stderr
