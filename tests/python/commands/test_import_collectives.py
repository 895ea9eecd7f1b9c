# SPDX-License-Identifier: Apache-2.0
"""`shardplan import-profile`: collectives of the model and of others, from ranks that are recorded here, from predicted
profiles in NCCL's words, and by the names that c10d and NCCL have for them."""

import gzip
import json
import pathlib
import sys

import pytest
from conftest import ROOT
from profiled_parallel import MODELS, RANKS, SCALARS, STEPS, TOKENS, record

sys.path.append(str(ROOT / "tests" / "python" / "adapter"))
sys.path.append(str(ROOT / "tools" / "python"))

from shardplan.import_profile import beside, collectives, communicators  # noqa: E402
from shardplan.import_profile.kineto import Collective, Profile, Work  # noqa: E402

FACTS = ("kind", "communicator", "count", "full_tensor_bytes")
OF_LOOP = ("broadcast", "unknown", 1, 4 * SCALARS)


def facts(report):
    return [tuple(entry[f] for f in FACTS) for entry in report["collectives"]]


def planned(shardplan, name, folder):
    here = pathlib.Path(__file__).resolve().parent
    trace = ("--batch", str(TOKENS), "--dtype", "float32", "-q", "-o", folder / "trace.json")
    done = shardplan("trace", f"profiled_parallel:{name}", *trace, cwd=str(here))
    assert done.returncode == 0, done.stderr
    made = ("--cluster", "h100_sxm_8", "--ranks", str(RANKS), "--unit", "layers.*", "--optimizer", "adamw", "-q")
    done = shardplan("plan", folder / "trace.json", *made, "-o", folder / "plan.json")
    assert done.returncode == 0, done.stderr
    return folder / "plan.json"


def simulated_of(shardplan, plan):
    return json.loads(shardplan("simulate", plan, "--report", "-", "-q").stdout)


@pytest.fixture(scope="module")
def plan(shardplan, tmp_path_factory):
    return planned(shardplan, "expert_parallel", tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def simulated(shardplan, plan):
    return simulated_of(shardplan, plan)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    from adapter_workers import run_on_ranks

    folder = tmp_path_factory.mktemp("recorded")
    for name in MODELS:
        (folder / name).mkdir()
    outcomes = run_on_ranks(RANKS, folder / "ranks", record, str(folder))
    assert all(outcome and outcome[0] == "returned" for outcome in outcomes), outcomes
    return {name: sorted((folder / name).glob("rank*.json.gz")) for name in MODELS}


@pytest.fixture(scope="module")
def profiles(recorded):
    return recorded["expert_parallel"]


@pytest.fixture
def imported(shardplan, tmp_path):
    def run(*arguments):
        done = shardplan("import-profile", *arguments, "-o", tmp_path / "measured.json", "-q")
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "measured.json").read_text())

    return run


def document(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def test_collectives_of_the_model_are_the_plans(plan, simulated, profiles, imported):
    report = imported(*profiles, "--plan", plan)
    assert {kind for kind, name, _, _ in facts(simulated) if name == "ep"} == {
        "all_gather", "all_reduce", "all_to_all", "send",
    }  # fmt: skip
    assert facts(report) == sorted([*facts(simulated), OF_LOOP])
    measured = report["measured"]
    assert (measured["collectives_beside_plan"], measured["collectives_missing"]) == (1, 0)
    assert any(note.startswith("broadcast on unknown: 1 of ") for note in report["notes"])
    busy = {stream["stream"]: stream["operations"] for stream in report["streams"]}
    assert busy["model ep"] == 8 + 3 and len(measured["steps_ns"]) == STEPS
    times = {entry["activity"]: entry["time_ns"] for entry in report["activities"]}
    assert times["all_to_all"] > 0 and times["send_recv"] > 0 and times["other_collective"] > 0
    assert sum(times.values()) == report["step_ns"]


def test_collectives_of_tensor_parallelism_are_the_plans(shardplan, recorded, imported, tmp_path):
    plan = planned(shardplan, "tensor_parallel", tmp_path)
    simulated = simulated_of(shardplan, plan)
    report = imported(*recorded["tensor_parallel"], "--plan", plan)
    assert ("all_reduce", "tp") in {row[:2] for row in facts(simulated)}
    assert facts(report) == sorted([*facts(simulated), OF_LOOP])


def test_compare_pairs_them(plan, profiles, shardplan, imported, tmp_path):
    imported(*profiles, "--plan", plan)
    done = shardplan("compare", plan, tmp_path / "measured.json", "--json", tmp_path / "c.json", "-q")
    assert done.returncode == 0, done.stderr
    pairs = {(p["kind"], p["communicator"]): p for p in json.loads((tmp_path / "c.json").read_text())["collectives"]}
    pair = pairs["all_to_all", "ep"]
    assert pair["predicted_count"] == pair["measured_count"] == 8 and pair["measured_ns"] > pair["predicted_ns"] > 0
    assert pairs["broadcast", "unknown"]["predicted_count"] == 0


def test_every_call_and_every_span_of_gloo_is_somewhere(plan, profiles, imported):
    """A plain count over the file: no collective is dropped. A send and its receive are one."""
    names = [
        event["name"]
        for event in document(profiles[0])["traceEvents"]
        if event.get("ph") == "X" and event["name"].startswith("gloo:")
    ]
    sends = names.count("gloo:send")
    assert sends == names.count("gloo:recv") == STEPS
    report = imported(profiles[0], "--plan", plan)
    assert sum(entry["count"] for entry in report["collectives"]) == (len(names) - sends) // STEPS


def test_ranks_of_other_pairs_are_not_waited_for(plan, profiles, imported):
    """Rank 2 has no pair with rank 0: they meet in FSDP's collectives alone, and in none of a profile without them."""
    pair, other = (imported(profiles[0], profiles[r], "--plan", plan)["measured"]["waiting_ns"] for r in (1, 2))
    assert pair > 0 and other > 0
    without = document(profiles[2])
    without["traceEvents"] = [
        event
        for event in without["traceEvents"]
        if not event["name"].startswith(("c10d::_allgather_base", "c10d::_reduce_scatter_base", "c10d::broadcast"))
    ]
    alone = profiles[0].parent / "only_pairs.json"
    alone.write_text(json.dumps(without))
    report = imported(profiles[0], alone, "--plan", plan)
    assert "rank 2 has no collective in common with rank 0" in report["notes"]


def test_cpu_ranks_on_a_machine_with_gpus_ran_on_a_cpu(plan, profiles, imported, shardplan, tmp_path):
    with_gpus = document(profiles[0])
    with_gpus["deviceProperties"] = [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85_000_000_000}]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(with_gpus))
    report = imported(path, "--plan", plan)
    assert report["measured"]["device"] == report["cluster"] == "CPU"
    assert report["memory"]["device_memory_bytes"] == 0
    assert "H100" not in json.dumps(report)


# ---- in NCCL's words ----


@pytest.fixture(scope="module")
def predicted(shardplan, plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("predicted") / "predicted.json"
    assert shardplan("simulate", plan, "--kineto", path, "-q").returncode == 0
    return json.loads(path.read_text())


def without(events, *words, of=("kernel",)):
    for event in events:
        if event.get("cat") in of:
            for word in words:
                event["args"].pop(word, None)


METADATA = (
    "Collective name", "Group size", "Process Group Ranks", "Process Group Description", "In msg nelems",
    "Out msg nelems",
)  # fmt: skip


@pytest.mark.parametrize("missing", [(), ("Process Group Ranks",), ("Process Group Description",)])
def test_a_predicted_profile_gives_the_collectives_back(missing, plan, simulated, predicted, imported, tmp_path):
    made = json.loads(json.dumps(predicted))
    without(made["traceEvents"], *missing)
    path = tmp_path / "predicted.json"
    path.write_text(json.dumps(made))
    report = imported(path, "--plan", plan)
    assert facts(report) == facts(simulated)
    assert report["measured"]["collectives_beside_plan"] == report["measured"]["collectives_missing"] == 0
    assert {stream["stream"] for stream in report["streams"]} == {stream["stream"] for stream in simulated["streams"]}
    for time in ("busy_ns", "exposed_ns"):
        found = {entry["kind"]: entry[time] for entry in report["collectives"] if entry["communicator"] == "ep"}
        for entry in simulated["collectives"]:
            if entry["communicator"] == "ep":
                assert abs(found[entry["kind"]] - entry[time]) <= 2 * entry["count"], (time, entry)


def test_kernels_without_metadata_are_what_the_calls_around_them_say(plan, simulated, predicted, imported, tmp_path):
    made = json.loads(json.dumps(predicted))
    without(made["traceEvents"], *METADATA)
    path = tmp_path / "predicted.json"
    path.write_text(json.dumps(made))
    counts = {}
    for kind, _, count, _ in facts(simulated):
        counts[kind] = counts.get(kind, 0) + count
    found = {}
    for kind, _, count, _ in facts(imported(path, "--plan", plan)):
        found[kind] = found.get(kind, 0) + count
    assert sum(found.values()) == sum(counts.values())
    for kind in ("all_to_all", "send"):
        assert found[kind] == counts[kind], "a kernel SendRecv says neither"


def test_a_group_that_the_plan_has_not_is_said_by_name_and_number(plan, simulated, predicted, imported, tmp_path):
    made = json.loads(json.dumps(predicted))
    for event in made["traceEvents"]:
        if event.get("args", {}).get("Collective name") == "all_to_all":
            event["args"] |= {
                "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]", "Group size": 8,
                "Process Group Description": "mesh_moe",
            }
    path = tmp_path / "predicted.json"
    path.write_text(json.dumps(made))
    report = imported(path, "--plan", plan)
    (row,) = [entry for entry in facts(report) if entry[0] == "all_to_all"]
    assert row[1:3] == ("mesh_moe of 8 ranks", 8)
    assert (report["measured"]["collectives_beside_plan"], report["measured"]["collectives_missing"]) == (8, 8)
    assert any(note.startswith("all_to_all on mesh_moe of 8 ranks: 8 of ") for note in report["notes"])


NAMES = {
    "all_gather": ["_allgather_base", "allgather", "allgather_into_tensor_coalesced"],
    "reduce_scatter": ["_reduce_scatter_base", "reduce_scatter", "reduce_scatter_tensor_coalesced"],
    "all_reduce": ["allreduce", "allreduce_coalesced"],
    "all_to_all": ["all_to_all", "all_to_allv", "alltoall_base_"],
    "broadcast": ["broadcast", "_broadcast_oop"],
    "reduce": ["reduce", "_reduce_oop"],
    "gather": ["gather"],
    "scatter": ["scatter"],
    "send": ["send"],
    "recv": ["recv", "recv_any_source_"],
    "barrier": ["barrier"],
}


def test_names_of_c10d_and_sizes_as_plans_have_them():
    metadata = {"In msg nelems": 10, "Out msg nelems": 40, "Group size": 4, "dtype": "BFloat16"}
    elements = {"reduce_scatter": 10, "all_to_all": 10, "scatter": 160}
    for kind, names in NAMES.items():
        for name in names:
            one = collectives.said({**metadata, "Collective name": name, "Process Group Ranks": "[0, 2, 4, 6]"})
            assert one == Collective(kind, (0, 2, 4, 6), 2 * elements.get(kind, 40), 4), name
    large = collectives.said({**metadata, "Collective name": "all_to_allv", "Process Group Ranks": "[0, 1, ...]"})
    assert (large.group, large.ranks) == ((), 4)


def host(name, begin, kind=None, elements=0):
    arguments = {"Collective name": kind, "In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float"}
    return {
        "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "begin": begin, "end": begin + 1,
        "args": arguments if kind else {},
    }


def on_cpu(name, shapes, types):
    return {"name": name, "begin": 0, "args": {"Input Dims": shapes, "Input type": types}}


def test_sizes_of_calls_follow_from_their_shapes():
    """Shapes are those that torch 2.15 writes. Lists of tensors have no dtype: Gloo's thread does."""
    thread = on_cpu("gloo:x", [[8]], ["float"])
    for name, shapes, types, kind, size_bytes, ranks in (
        ("_allgather_base_", [[264], [66], []], ["c10::BFloat16", "c10::BFloat16", ""], "all_gather", 528, 4),
        ("allgather_into_tensor_coalesced_", [[[32, 32]], [[16, 32]]], ["TensorList"] * 2, "all_gather", 4096, 2),
        ("allgather_", [[], [[32, 4]]], ["", "TensorList"], "all_gather", 0, 0),
        ("_reduce_scatter_base_", [[792], [3168]], ["double", "double"], "reduce_scatter", 25344, 4),
        ("allreduce_", [[[]], []], ["TensorList", ""], "all_reduce", 4, 0),
        ("alltoall_base_", [[16, 32], [8, 32]], ["long int", "long int"], "all_to_all", 2048, 0),
        ("alltoall_", [[[64], [64]], [[64], [32]]], ["TensorList"] * 2, "all_to_all", 384, 0),
        ("send", [[[16, 32]], [], []], ["TensorList", "", "Scalar"], "send", 2048, 0),
        ("gather_", [[], [[32, 4]]], ["", "TensorList"], "gather", 0, 0),
        ("barrier", [], [], "barrier", 0, 0),
    ):  # fmt: skip
        one = collectives.called(on_cpu("c10d::" + name, shapes, types), thread)
        assert (one.kind, one.full_tensor_bytes, one.ranks) == (kind, size_bytes, ranks), name


KERNEL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def test_one_kernel_stands_for_a_group_of_sends():
    """Calls of a group launch nothing. Their kernel has no metadata, or those of the last call."""
    calls = [
        host("record_param_comms", 10, "send", 8), host("record_param_comms", 20, "recv", 6),
        host("record_param_comms", 30, "send", 2), host("record_param_comms", 90, "send", 1),
    ]
    last = {"Collective name": "recv", "In msg nelems": 6, "dtype": "Float"}
    for arguments in ({}, {"Collective name": "coalesced"}, last):
        transfers = collectives.Transfers(calls)
        first = collectives.of_kernel(KERNEL, arguments, (), lambda: transfers.until((1, 1), 40))
        assert (first.kind, first.full_tensor_bytes) == ("send", 40)
        assert not transfers.until((1, 1), 50) and len(transfers.until((1, 1), 100)) == 1
    # An all_to_all between them takes none.
    transfers = collectives.Transfers(calls)
    exchange = {"Collective name": "all_to_allv", "In msg nelems": 5, "dtype": "Float"}
    assert collectives.of_kernel(KERNEL, exchange, (), lambda: transfers.until((1, 1), 40)).kind == "all_to_all"
    assert len(transfers.until((1, 1), 40)) == 3
    around = (host("c10d::alltoall_base_", 1), host("record_param_comms", 2, "all_to_all", 7))
    assert collectives.of_kernel(KERNEL, {}, around, list) == Collective("all_to_all", (), 28)
    assert collectives.of_kernel(KERNEL, {}, (), list).kind == "SendRecv"


def test_collectives_that_a_recording_cannot_have_are_not_missing():
    rows = [row("all_reduce", "tp", 3, 300), row("all_reduce", "tp", 1, 50), row("all_gather", "shard", 2, 8)]
    expected = beside.planned({"collectives": rows}, {("all_reduce", "tp"): (3, 300)})
    assert expected == {("all_reduce", "tp"): (1, 50), ("all_gather", "shard"): (2, 8)}
    assert beside.planned({"collectives": rows}, {("all_reduce", "tp"): (4, 350)}) == {("all_gather", "shard"): (2, 8)}
    found = [row("all_gather", "shard", 2, 8), row("broadcast", "a group of 8 ranks", 1, 4)]
    assert beside.counted(found, expected) == (
        1, 1, ["all_reduce on tp: 0 of 0 bytes in a step, the plan has 1 of 50",
               "broadcast on a group of 8 ranks: 1 of 4 bytes in a step, the plan has 0 of 0"],
    )  # fmt: skip


# ---- which communicator ----


def small_plan(*groups, entries=()):
    """groups: (name, size, stride)."""
    return {
        "communicators": [{"name": name, "size": size, "stride": stride} for name, size, stride in groups],
        "segments": [{"name": "forward", "entries": [["op", "aten.mm"], *(["op", "c10d.x", one] for one in entries)]}],
        "steps": [{"triggers": [{"instructions": [{"kind": "compute", "segment": "forward"}]}]}],
    }


def entry(kind, communicator, size_bytes, **more):
    return {"kind": kind, "communicator": communicator, "size_bytes": size_bytes, **more}


def row(kind, communicator, count, size_bytes):
    return {"kind": kind, "communicator": communicator, "count": count, "full_tensor_bytes": size_bytes}


def test_ranks_names_ranges_and_bytes_tell_communicators_apart():
    entries = [entry("all_reduce", "tp", 100), entry("all_reduce", "cp", 200), entry("all_reduce", "cp", 300)]
    plan = small_plan(("tp", 2, 1), ("cp", 2, 2), ("replicate", 2, 4), entries=entries)
    rows = [row("all_reduce", "replicate", 4, 4000), row("all_reduce", "tp", 1, 100), row("all_reduce", "cp", 2, 500)]
    known = communicators.Communicators(plan, {"collectives": rows}, rank=5)
    assert known.of_models() == {("all_reduce", "tp"): (1, 100), ("all_reduce", "cp"): (2, 500)}

    def found(ranges=(), **facts):
        one = Collective(**{"kind": "all_reduce", "group": (), "full_tensor_bytes": 0, **facts})
        return known.find(Work(0, 1, 0, "", 0, ranges=ranges, collective=one))

    # Rank 5 has digits 1, 0, 1.
    for group, name in (((4, 5), "tp"), ((5, 7), "cp"), ((1, 5), "replicate")):
        assert found(group=group).communicator == name
        assert found(group=group).of_model == (name != "replicate")
    assert found(group_name="mesh_cp", size=2).communicator == "cp"
    assert found(("FSDP::post_backward_reduce (layers.0)",)).communicator == "replicate"
    assert found(("FullyShardedDataParallel.forward",), full_tensor_bytes=100).communicator == "tp"
    assert found(full_tensor_bytes=300) == Collective("all_reduce", (5, 7), 300, communicator="cp", of_model=True)
    assert found(size=3, group_name="mesh_ep").communicator == "mesh_ep of 3 ranks"
    assert found(kind="barrier").communicator == "unknown"


def test_a_group_over_dimensions_apart_has_their_ranks():
    assert communicators.ranks_of({"size": 4, "dims": [{"size": 2, "stride": 8}, {"size": 2, "stride": 1}]}, 10) == (
        2, 3, 10, 11,
    )  # fmt: skip
    assert communicators.ranks_of({"name": "all", "size": 4}, 3) == (0, 1, 2, 3)


def test_a_group_of_sends_in_a_plan_is_one_of_the_larger_direction():
    entries = [
        entry("send", "pp", 10, batch=0), entry("recv", "pp", 30, batch=0), entry("send", "pp", 15, batch=0),
        entry("send", "pp", 7),
    ]
    assert [(one["kind"], one["size_bytes"]) for one in communicators.of_model(small_plan(entries=entries))] == [
        ("send", 30), ("send", 7),
    ]  # fmt: skip


def test_profiles_of_others_are_assigned_by_their_own_rank():
    plan = small_plan(("ep", 2, 1), entries=[entry("all_to_all", "ep", 8)])
    simulated = {"collectives": [row("all_to_all", "ep", 1, 8)]}
    for rank, group in ((0, (0, 1)), (3, (2, 3))):
        work = Work(0, 1, 0, "", 0, collective=Collective("all_to_all", (), 8))
        communicators.assign(Profile("p", rank, 4, "", 0, [], [work], [], [], []), plan, simulated)
        assert work.collective.group == group
