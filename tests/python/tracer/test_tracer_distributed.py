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
needs_spmd_types = pytest.mark.skipif(importlib.util.find_spec("spmd_types") is None, reason="spmd_types")


def run(name, folder, *arguments):
    """In a process of its own."""
    words = [f"tracer_distributed:{name}", "-q", "-o", folder / f"{name}.json", "--batch", "8", "--seq", "64"]
    return warm.run(["-c", COMMAND, *words, *arguments], cwd=HERE, timeout=300)


def traced(name, folder, *arguments):
    done = run(name, folder, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / f"{name}.json").read_text())


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


GATHERS = ("_c10d_functional.all_gather_into_tensor", "c10d._allgather_base_")
SCATTERS = ("_c10d_functional.reduce_scatter_tensor", "c10d._reduce_scatter_base_")


@needs_torchtitan
@pytest.mark.parametrize("backend", ["dtensor", "spmd_types"])
def test_torchtitans_tensor_parallel_llama_has_the_flops_of_the_model(backend, tmp_path):
    whole, cut = (traced(name, tmp_path) for name in ("titan_whole", f"titan_{backend}"))
    assert sum(flops_by_module(cut).values()) * TP == sum(flops_by_module(whole).values())
    names = [event[1] for event in operators(cut)]
    # Attention and feed forward of 6 layers and the ends, forward and backward; three sums of the loss.
    assert sum(name in GATHERS for name in names) == sum(name in SCATTERS for name in names) == 2 * (2 * 6 + 1)
    assert names.count("_c10d_functional.all_reduce") == 3
    cut_along = {entry["fqn"]: entry["placements"] for entry in cut["parameters"]}
    assert cut_along["layers.0.attention.wo.weight"] == [{"mesh_dim": "tp", "size": TP, "dim": 1}]
    assert cut_along["norm.weight"] == [{"mesh_dim": "tp", "size": TP, "grad_partial": True}]


@needs_spmd_types
def test_annotated_parameters_have_placements(tmp_path):
    """The dimension along which all of them are replicated is FSDP's own."""
    placed = {
        entry["fqn"]: entry["placements"] for entry in traced("annotated_replicated", tmp_path)["parameters"]
    }
    assert placed == {
        "0.weight": [{"mesh_dim": "tp", "size": TP, "dim": 0}],
        "0.bias": [{"mesh_dim": "tp", "size": TP}],
        "1.weight": [{"mesh_dim": "tp", "size": TP, "grad_partial": True}],
    }


@needs_spmd_types
@pytest.mark.parametrize(
    "name, message",
    [
        ("annotated_partial", "parameter 1.weight is annotated with P along mesh dimension tp"),
        ("annotated_elsewhere", "parameter 1.weight is annotated along a group that is no dimension of the mesh"),
    ],
)
def test_an_annotation_that_has_no_placement_is_an_error(name, message, tmp_path):
    done = run(name, tmp_path)
    assert done.returncode == 3
    assert message in done.stderr


# ---- collectives ----

DOORS = """
import json, sys
sys.path.insert(0, "../../../tools/python")
from shardplan.tracer import session
import torch
import tracer_distributed as models
models.join()
found = {}
for door in models.DOORS:
    options = session.Options(loss="none")
    found[door.__name__] = session.trace_module(models.Communicating(door), (torch.zeros(8, 16),), options=options)
print(json.dumps(found))
"""
PART, WHOLE, GATHERED = 2 * 16 * 4, 8 * 16 * 4, 4 * 8 * 16 * 4
# name -> (operator, bytes read, bytes written, storages read, storages written), each
EXPECTED = {
    "all_reduce": [("c10d.allreduce_", WHOLE, WHOLE, 1, 1)],
    "all_reduce_async": [("c10d.allreduce_", WHOLE, WHOLE, 1, 1)],
    "all_gather_into_tensor": [("c10d._allgather_base_", WHOLE, GATHERED, 1, 1)],
    "reduce_scatter_tensor": [("c10d._reduce_scatter_base_", WHOLE, PART, 1, 1)],
    "all_to_all_single": [("c10d.alltoall_base_", WHOLE, WHOLE, 1, 1)],
    "all_to_all": [("c10d.alltoall_", WHOLE, WHOLE, 1, 4)],
    "all_gather": [("c10d.allgather_", WHOLE, GATHERED, 1, 4)],
    "broadcast_of_the_root": [("c10d.broadcast_", WHOLE, 0, 1, 0)],
    "broadcast_of_another": [("c10d.broadcast_", 0, WHOLE, 0, 1)],
    "reduce_to_the_root": [("c10d.reduce_", WHOLE, WHOLE, 1, 1)],
    "reduce_to_another": [("c10d.reduce_", WHOLE, 0, 1, 0)],
    "batch_isend_irecv": [("c10d.send", WHOLE, 0, 1, 0), ("c10d.recv_", 0, WHOLE, 0, 1)],
    "coalesced": [("c10d.allreduce_coalesced_", 2 * WHOLE, 2 * WHOLE, 2, 2)],
    "barrier": [],
    "functional_all_gather": [("_c10d_functional.all_gather_into_tensor", WHOLE, GATHERED, 1, 1)],
    "functional_all_reduce": [("_c10d_functional.all_reduce", WHOLE, WHOLE, 1, 1)],
    "functional_send": [("_c10d_functional.isend", WHOLE, 0, 1, 0)],
    "functional_out": [("_c10d_functional.reduce_scatter_tensor_out", WHOLE, PART, 1, 1)],
    "differentiable_all_to_all": [("c10d.alltoall_base_", WHOLE, WHOLE, 1, 1)],
}


@pytest.fixture(scope="module")
def doors():
    done = warm.run(["-c", DOORS], cwd=HERE, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def is_collective(event):
    return event[1].startswith(("c10d.", "_c10d_functional."))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_collective_of_any_door_is_an_operator(name, doors):
    found = [event for event in operators(doors[name]) if is_collective(event)]
    assert [(e[1], e[5], e[6], len(e[8]), len(e[9])) for e in found] == EXPECTED[name]


def test_every_door_is_tried(doors):
    assert doors.keys() == EXPECTED.keys()


def test_a_collective_in_place_is_between_what_makes_its_tensor_and_what_follows(doors):
    product, reduction = operators(doors["all_reduce"])
    assert product[9] == reduction[8] == reduction[9]
    scaled, reduced = operators(doors["coalesced"])[1:]
    assert reduced[8] == reduced[9] == scaled[8] + scaled[9]


def test_a_backward_exchanges_its_gradient(tmp_path):
    trace = traced("exchanges", tmp_path)
    assert [[event[1] for event in entry["events"] if event[0] == "op" and is_collective(event)]
            for entry in (*trace["forwards"], *trace["backwards"])] == [["c10d.alltoall_base_"]] * 2


def test_a_parameter_behind_a_collective_without_a_gradient_gets_none(tmp_path):
    trace = traced("gathers_without_gradient", tmp_path)
    assert all(event[0] != "param_grad" for event in trace["backwards"][0]["events"])


def test_a_collective_that_nobody_knows_is_an_error_with_its_place(tmp_path):
    done = run("novel_collective", tmp_path)
    assert done.returncode == 3
    assert "does not know what the collective _c10d_functional.novel reads and writes (in (root)" in done.stderr
    assert "tracer_distributed.py:" in done.stderr and "self.door(self.linear(x))" in done.stderr
