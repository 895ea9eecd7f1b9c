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
    assert names.count("_c10d_functional.all_reduce_") == 3
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
def test_a_dimension_along_which_nothing_communicates_is_noted(tmp_path):
    assert "parameters are cut along tp, and no collective is along it" in run("annotated_replicated", tmp_path).stderr
    assert "no collective is along it" not in run("tensor_parallel", tmp_path).stderr


@needs_spmd_types
def test_an_axis_is_fsdps_by_its_name(tmp_path):
    """All parameters are R along tp, and FSDP does not manage it; one is cut along the ranks of fsdp, which it manages
    for the other."""
    def placed(name):
        return [entry.get("placements") for entry in traced(name, tmp_path)["parameters"]]

    assert placed("annotated_all_replicated") == [[{"mesh_dim": "tp", "size": TP, "grad_partial": True}]] * 2
    assert placed("annotated_experts") == [[{"mesh_dim": "ep", "size": 8, "dim": 0}], None]


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


def collective(name, kind, size, read, written, counts=(1, 1), **optional):
    """(operator, bytes read, bytes written, storages read, storages written, details)"""
    return (f"{name}", read, written, *counts, {"kind": kind, "communicator": 0, "size_bytes": size, **optional})


def c10d(name, *rest, **optional):
    return collective(f"c10d.{name}", *rest, **optional)


def functional(name, *rest, **optional):
    return collective(f"_c10d_functional.{name}", *rest, **optional)


def sent(**optional):
    return c10d("send", "send", WHOLE, WHOLE, 0, (1, 0), **optional)


def received(**optional):
    return c10d("recv_", "recv", WHOLE, 0, WHOLE, (0, 1), **optional)


ALL_REDUCE = ("all_reduce", WHOLE, WHOLE, WHOLE)
SCATTER = ("reduce_scatter", WHOLE, WHOLE, PART)
GATHER = ("all_gather", GATHERED, WHOLE, GATHERED)
EXCHANGE = ("all_to_all", WHOLE, WHOLE, WHOLE)
BROADCAST = ("broadcast", WHOLE)
# The whole tensor is named by size_bytes: what is gathered, what is scattered.
EXPECTED = {
    "all_reduce": [c10d("allreduce_", *ALL_REDUCE)],
    "all_reduce_async": [c10d("allreduce_", *ALL_REDUCE)],
    "all_gather_into_tensor": [c10d("_allgather_base_", *GATHER)],
    "reduce_scatter_tensor": [c10d("_reduce_scatter_base_", *SCATTER)],
    "all_to_all_single": [c10d("alltoall_base_", *EXCHANGE)],
    "all_to_all": [c10d("alltoall_", *EXCHANGE, (1, 4))],
    "all_gather": [c10d("allgather_", *GATHER, (1, 4))],
    "broadcast_of_the_root": [c10d("broadcast_", *BROADCAST, WHOLE, 0, (1, 0))],
    "broadcast_of_another": [c10d("broadcast_", *BROADCAST, 0, WHOLE, (0, 1))],
    "reduce_to_the_root": [c10d("reduce_", "reduce", WHOLE, WHOLE, WHOLE)],
    "reduce_to_another": [c10d("reduce_", "reduce", WHOLE, WHOLE, 0, (1, 0))],
    "batch_isend_irecv": [sent(peer=1, batch=0), received(peer=3, batch=0)],
    "coalesced": [c10d("allreduce_coalesced_", "all_reduce", 2 * WHOLE, 2 * WHOLE, 2 * WHOLE, (2, 2))],
    "barrier": [],
    "functional_all_gather": [functional("all_gather_into_tensor", *GATHER, work=0)],
    "functional_all_reduce": [functional("all_reduce_", *ALL_REDUCE, work=0)],
    "functional_send": [functional("isend", "send", WHOLE, WHOLE, 0, (1, 0), peer=1, work=0)],
    "functional_out": [functional("reduce_scatter_tensor_out", *SCATTER, work=0)],
    "differentiable_all_to_all": [c10d("alltoall_base_", *EXCHANGE)],
    # The receive stands between the send and its wait.
    "isend_and_irecv": [sent(peer=1, work=0), received(peer=3, work=1), ["wait", 0], ["wait", 1]],
    "batch_of_one": [sent(peer=2)],
    "two_batches": [sent(peer=1, batch=0), received(peer=3, batch=0), sent(peer=1, batch=1), received(peer=3, batch=1)],
    "coalesced_of_two_kinds": [
        # The gather could be one with others of its kind, so it is issued at the end.
        c10d("broadcast_", *BROADCAST, WHOLE, 0, (1, 0), work=0, batch=0),
        c10d("allgather_into_tensor_coalesced_", *GATHER, work=1, batch=0),
        ["wait", 0],
        ["wait", 1],
    ],
    "functional_batch": [
        functional("batch_p2p_ops", "send", WHOLE, WHOLE, 0, (1, 0), peer=1, batch=0, work=0),
        functional("batch_p2p_ops", "recv", WHOLE, 0, WHOLE, (0, 1), peer=3, batch=0, work=1),
    ],
    "asynchronous": [c10d("allreduce_", *ALL_REDUCE, work=0), ["wait", 0]],
    "waited_for_by_its_future": [c10d("allreduce_", *ALL_REDUCE, work=0), ["wait", 0]],
    "polled": [c10d("allreduce_", *ALL_REDUCE)],
    "functional_used_later": [functional("all_gather_into_tensor", *GATHER, work=0), ["wait", 0]],
    "inside_of_an_operator": [functional("all_gather_into_tensor", *GATHER)],
    "never_waited_for": [c10d("allreduce_", *ALL_REDUCE, work=0)],
    # Rank 0 receives 5 rows of each, where a rank sends 8.
    "uneven_all_to_all": [
        c10d("alltoall_base_", "all_to_all", WHOLE, WHOLE, 20 * 16 * 4, busiest_ppm=20 * 1_000_000 // 8)
    ],
}


@pytest.fixture(scope="module")
def doors():
    done = warm.run(["-c", DOORS], cwd=HERE, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def is_collective(event):
    return event[0] == "op" and event[1].startswith(("c10d.", "_c10d_functional."))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_collective_of_any_door_is_an_operator(name, doors):
    found = [event for event in doors[name]["forwards"][0]["events"] if event[0] == "wait" or is_collective(event)]
    assert [e if e[0] == "wait" else (e[1], e[5], e[6], len(e[8]), len(e[9]), e[11]) for e in found] == EXPECTED[name]
    assert doors[name]["world_size"] == TP
    assert doors[name].get("communicators", []) == [{"name": "world", "size": TP, "stride": 1}] * bool(found)
    assert "same_batch" not in doors[name]


def test_every_door_is_tried(doors):
    assert doors.keys() == EXPECTED.keys()


def test_work_beside_a_collective_is_between_its_event_and_its_wait(doors):
    """A product is after the issue in both, and what needs the result behind the wait."""
    for name in ("asynchronous", "waited_for_by_its_future", "functional_used_later"):
        events = [event for event in doors[name]["forwards"][0]["events"] if event[0] in ("op", "wait")]
        issued = next(i for i, event in enumerate(events) if is_collective(event))
        waited = events.index(["wait", 0])
        assert "aten.mm" in [event[1] for event in events[issued:waited]], name
        needs = [i for i, event in enumerate(events) if event[0] == "op" and set(event[8]) & set(events[issued][9])]
        assert min(i for i in needs if i > issued) > waited, name


def communicators(trace):
    return [(entry["name"], entry["size"], entry["stride"], entry.get("dims")) for entry in trace["communicators"]]


def test_a_group_is_the_dimension_of_a_mesh_that_it_is(tmp_path):
    """12 ranks: dp 2, cp 3, tp 2."""
    trace = traced("of_a_mesh", tmp_path)
    assert trace["world_size"] == 12 and trace["same_batch"] == ["tp"]
    apart = [{"size": 2, "stride": 6}, {"size": 2, "stride": 1}]
    assert communicators(trace) == [
        ("cp", 3, 2, None), ("tp", 2, 1, None), ("outer_tp", 4, 1, apart), ("cp_tp", 6, 1, None)
    ]
    found = [event for event in operators(trace) if is_collective(event)]
    assert [event[11]["communicator"] for event in found[:4]] == [0, 1, 2, 3]
    assert len(found) == 5 and len(found[4]) == 11, "one rank alone copies"


def test_a_group_of_no_mesh_is_named_by_its_ranks(tmp_path):
    trace = traced("of_every_other_rank", tmp_path, "--own-batch", "ranks_0_2")
    assert communicators(trace) == [("ranks_0_2", 2, 2, None)]


def test_parameters_name_dimensions_too(tmp_path):
    trace = traced("placed_along_unknown", tmp_path, "--same-batch", "columns")
    assert communicators(trace) == [("columns", TP, 1, None)] and trace["same_batch"] == ["columns"]
    assert not any(is_collective(event) for event in operators(trace))


@pytest.mark.parametrize("flag, same", [("--same-batch", ["rows", "tp"]), ("--own-batch", ["tp"])])
def test_a_flag_says_whose_batch_an_unknown_dimension_has(flag, same, tmp_path):
    assert traced("of_unknown_name", tmp_path, flag, "rows")["same_batch"] == same


@pytest.mark.parametrize(
    "name, arguments, code, message",
    [
        ("of_unknown_name", (), 3, "it is not known whether the ranks along rows work on the same batch: --same-batch"),
        ("placed_along_unknown", (), 3, "parameter weight: it is not known whether the ranks along columns"),
        ("of_no_dimension", (), 3, "among the ranks 0, 3 of 4, which are no dimension of a mesh, nor several (dp, tp)"),
        ("of_no_digits", ("--own-batch", "ranks_0_1_2"), 3, "the ranks 0, 1, 2 of 4 (ranks_0_1_2) are no digits"),
        ("receives_from_any", (), 3, "a recv from any rank: a trace says from whom"),
        ("splits_of_three", (), 3, "an all_to_all among 4 ranks has 3 input splits ([4, 2, 2])"),
        ("splits_of_too_few_rows", (), 3, "the input splits [2, 2, 2, 1] of an all_to_all do not make the 8 rows"),
        ("splits_to_itself", (), 3, "(number 0 of 4) sends itself 2 rows and receives 1 from itself"),
        ("splits_that_get_lost", (), 3, "the rank sends 8 rows ([2, 3, 1, 2]) and receives 7 ([2, 2, 2, 1])"),
        ("of_a_mesh", ("--same-batch", "cp", "--own-batch", "cp"), 2, "--same-batch cp and --own-batch cp contradict"),
        ("of_a_mesh", ("--same-batch", "columns"), 2, "columns: the model communicates along no dimension of that"),
    ],
)
def test_a_group_or_a_split_that_a_trace_cannot_have_is_an_error(name, arguments, code, message, tmp_path):
    done = run(name, tmp_path, *arguments)
    assert done.returncode == code and message in done.stderr, done.stderr
    if code == 3 and not name.startswith("placed"):
        assert "(in (root) (Communicating), at tracer_distributed.py:" in done.stderr


def test_a_collective_in_place_is_between_what_makes_its_tensor_and_what_follows(doors):
    product, reduction = operators(doors["all_reduce"])
    assert product[9] == reduction[8] == reduction[9]
    scaled, reduced = operators(doors["coalesced"])[1:]
    assert reduced[8] == reduced[9] == scaled[8] + scaled[9]


def test_a_functional_reduction_is_of_a_copy(doors):
    copy, reduction = [event for event in operators(doors["functional_all_reduce"])][-2:]
    assert copy[1] == "aten.clone" and copy[9] == reduction[8] == reduction[9] and copy[8] != copy[9]
    assert (copy[5], copy[6]) == (WHOLE, WHOLE)


def test_an_exchange_of_dtensor_takes_memory_for_this_ranks_part(tmp_path):
    """Twice: blocks for the other ranks lie one behind the other, before or after."""
    trace = traced("columns_to_rows", tmp_path)
    exchanges = 0
    for entry in (*trace["forwards"], *trace["backwards"]):
        events = entry["events"]
        taken = {event[1]: event[2] for event in events if event[0] == "+"}
        died = {event[1]: position for position, event in enumerate(events) if event[0] == "-"}
        for position, event in enumerate(events):
            if event[0] != "op" or event[1] != "_dtensor.shard_dim_alltoall":
                continue
            exchanges += 1
            (sent,), (received,) = event[8], event[9]
            copies = [e for e in events if e[0] == "op" and e[1] == "aten.contiguous"]
            assert [e[9] for e in copies if e[9] == [sent]] or [e[8] for e in copies if e[8] == [received]]
            assert {taken[storage] for storage in (sent, received) if storage in taken} == {8 * 16 * 4}
            assert died.get(sent, position + 1) > position
    assert exchanges == 2, "forward and backward"


def test_a_backward_exchanges_its_gradient(tmp_path):
    trace = traced("exchanges", tmp_path)
    assert [[event[1] for event in entry["events"] if event[0] == "op" and is_collective(event)]
            for entry in (*trace["forwards"], *trace["backwards"])] == [["c10d.alltoall_base_"]] * 2


def test_a_parameter_behind_a_collective_without_a_gradient_gets_none(tmp_path):
    trace = traced("gathers_without_gradient", tmp_path)
    assert all(event[0] != "param_grad" for event in trace["backwards"][0]["events"])


def test_compiled_blocks_communicate(tmp_path):
    done = run("compiled_exchanges", tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr  # Dynamo compiles the model and not the recorder
    names = [event[1] for event in operators(json.loads((tmp_path / "compiled_exchanges.json").read_text()))]
    assert names.count("c10d.allreduce_") == 3


def test_calls_of_fully_shard_change_no_trace_and_are_told(tmp_path):
    done = run("sharded", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the trace is of the model before: --strategy FILE has them" in done.stderr
    found, expected = json.loads((tmp_path / "sharded.json").read_text()), traced("whole", tmp_path)
    assert {key: found[key] for key in ("modules", "parameters", "forwards", "backwards")} == {
        key: expected[key] for key in ("modules", "parameters", "forwards", "backwards")
    }


def test_a_model_that_is_sharded_already_is_an_error(tmp_path):
    done = run("flat", tmp_path)
    assert done.returncode == 3
    assert "layers.1 is under FullyShardedDataParallel already: trace the model without it" in done.stderr


def test_a_collective_that_nobody_knows_is_an_error_with_its_place(tmp_path):
    done = run("novel_collective", tmp_path)
    assert done.returncode == 3
    assert "does not know what the collective _c10d_functional.novel reads and writes (in (root)" in done.stderr
    assert "tracer_distributed.py:" in done.stderr and "self.door(self.linear(x))" in done.stderr
