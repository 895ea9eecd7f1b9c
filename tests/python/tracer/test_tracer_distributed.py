# SPDX-License-Identifier: Apache-2.0
"""Traces of distributed models: the work of one rank and nothing else."""

import importlib.util
import json

import pytest
import warm
from conftest import ROOT
from tracer_distributed import TP

HERE = ROOT / "tests" / "python" / "tracer"
COMMAND = """
import sys
sys.path.insert(0, "../../../tools/python")
from shardplan.tracer import cli
sys.exit(cli.main(sys.argv[1:]))
"""
needs_torchtitan = pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan")


def traced(name, folder, *arguments):
    """In a process of its own."""
    path = folder / f"{name}.json"
    words = [f"tracer_distributed:{name}", "-q", "-o", path, "--batch", "8", "--seq", "64", *arguments]
    done = warm.run(["-c", COMMAND, *words], cwd=HERE, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


def operators(trace):
    return [event for entry in trace["forwards"] + trace["backwards"] for event in entry["events"] if event[0] == "op"]


def flops_by_module(trace):
    counts = {}
    for event in operators(trace):
        fqn = trace["modules"][event[2]]["fqn"] if event[2] >= 0 else None
        counts[fqn] = counts.get(fqn, 0) + event[4]
    return counts


def test_flops_of_a_tensor_parallel_trace_are_the_models_within_what_is_replicated(tmp_path):
    whole, cut = (flops_by_module(traced(name, tmp_path)) for name in ("whole", "tensor_parallel"))
    assert whole["head"] > 0
    for fqn, count in whole.items():
        assert cut[fqn] * (1 if fqn == "head" else TP) == count, fqn


def test_shape_propagation_leaves_no_tensors_behind(tmp_path):
    trace = traced("tensor_parallel", tmp_path)
    assert [entry["name"] for entry in trace["inputs"]] == ["args.0"]
    largest = max(event[2] for entry in trace["forwards"] for event in entry["events"] if event[0] == "+")
    assert largest == 8 * 32 * 4, "of the whole head, not of a cut layer: 8 x 64 x 4 bytes"


@needs_torchtitan
@pytest.mark.parametrize("backend", ["dtensor", "spmd_types"])
def test_torchtitans_tensor_parallel_llama_has_the_flops_of_the_model(backend, tmp_path):
    whole, cut = (traced(name, tmp_path) for name in ("titan_whole", f"titan_{backend}"))
    assert sum(flops_by_module(cut).values()) * TP == sum(flops_by_module(whole).values())
