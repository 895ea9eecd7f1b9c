# SPDX-License-Identifier: Apache-2.0
"""The tracer's document, and its order against what hooks see on real tensors."""

import copy
import json
import os
import subprocess
import sys

import jsonschema
import pytest
import torch
import tracer_models as models
from conftest import ROOT
from torch.utils.checkpoint import set_checkpoint_early_stop
from tracer_support import CASES, events_of, fqn_of, order_on_real_tensors, passes, saved_in, tokens, trace_case

from shardplan.tracer import document
from shardplan.tracer.session import Options, trace_module

FOLDER = ROOT / "tests" / "python" / "tracer"
SCHEMA = ROOT / "schemas" / "json" / "trace.schema.json"


# ---- the document ----


@pytest.mark.parametrize("name", CASES)
def test_every_id_is_known_and_every_storage_lives_once(name):
    trace = trace_case(name)
    alive = {e["storage"] for e in (*trace["inputs"], *trace["buffers"])}
    born = set(alive)
    for entry in passes(trace):
        for event in entry["events"]:
            if event[0] == "+":
                assert event[1] not in born and event[2] > 0 and event[3] != ""
                assert (len(event) == 6) == (event[3] == "parameter_grad")
                born.add(event[1])
                alive.add(event[1])
            elif event[0] == "-":
                alive.remove(event[1])
            elif event[0] == "op":
                assert set(event[8]) <= alive and set(event[9]) <= alive, event
                assert -1 <= event[2] < len(trace["modules"]) and set(event[10]) <= set(range(len(trace["parameters"])))
            elif event[0] in ("enter", "exit"):
                assert set(event[2]) <= set(range(len(entry["tensors"])))
            elif event[0] == "param_grad":
                assert event[2] in alive
        for tensor in entry.get("tensors", ()):
            assert tensor.get("storage", -1) in born | {-1}
    roles = {event[1]: event[3] for event in events_of(trace) if event[0] == "+"}
    assert {roles.get(s) for s in alive} <= {None, "parameter_grad"}, "only gradients outlive the step"
    assert sorted(born) == list(range(len(born))), "ids are dense"


@pytest.mark.parametrize("name", CASES)
def test_document_follows_the_schema_and_is_the_same_json(name):
    trace = trace_case(name)
    text = "".join(document.lines(trace))
    read = json.loads(text)
    trace = copy.deepcopy(trace)
    for entry in passes(trace):
        for empty in [field for field in ("tensors", "forwards") if entry.get(field) == []]:
            del entry[empty]
    assert read == {
        key: value
        for key, value in trace.items()
        if value not in ([], "", 0) or key in ("modules", "parameters", "forwards")
    }
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(read)


def test_module_tree_names_ties_duplicates_and_buffers():
    trace = trace_case("llama_tied")
    assert trace["modules"][0] == {
        "fqn": "",
        "class_name": "Llama",
        "children": ["embed", "layers", "norm", "head"],
        "buffers": ["cos", "sin"],
    }
    by_fqn = {m["fqn"]: m for m in trace["modules"]}
    assert by_fqn["head"]["parameters"] == by_fqn["embed"]["parameters"] == [{"name": "weight", "parameter": 0}]
    assert trace["parameters"][0]["shared_with"] == ["head.weight"]
    assert [(b["fqn"], b.get("persistent", True)) for b in trace["buffers"]] == [("cos", False), ("sin", True)]

    trace = trace_case("reused")
    by_fqn = {m["fqn"]: m for m in trace["modules"]}
    assert by_fqn["alias"]["same_module_as"] == "shared" and "same_module_as" not in by_fqn["shared"]
    assert [p["fqn"] for p in trace["parameters"]] == ["first.weight", "first.bias", "shared.weight", "shared.bias"]
    assert trace["parameters"][2]["shared_with"] == ["alias.weight"]


def test_parameter_dtype_is_kept_and_passes_are_in_the_compute_dtype():
    trace = trace_case("llama", dtype="bfloat16")
    assert trace["compute_dtype"] == "bfloat16" and {p["dtype"] for p in trace["parameters"]} == {"float32"}
    assert {b["dtype"] for b in trace["buffers"]} == {"float32"}, "mixed precision casts parameters only"
    assert {e[3] for e in events_of(trace) if e[0] == "op" and e[1] == "aten.mm"} == {"bfloat16"}
    sizes = {e[5]: e[2] for e in events_of(trace) if e[0] == "+" and e[3] == "parameter_grad"}
    for index, parameter in enumerate(trace["parameters"]):
        assert sizes[index] == 2 * torch.Size(parameter["shape"]).numel()


# ---- order, against real tensors ----


def _order_of(trace):
    log = []
    for event in events_of(trace):
        if event[0] in ("enter", "exit"):
            log.append((event[0], fqn_of(trace, event[1])))
        elif event[0] == "grad_ready":
            log.append((event[0], fqn_of(trace, event[1]), event[2], event[3]))
        elif event[0] == "inputs_done":
            log.append((event[0], fqn_of(trace, event[1]), event[2]))
        elif event[0] == "param_grad":
            log.append((event[0], trace["parameters"][event[1]]["fqn"]))
    return log


# A real identity is a view in autograd's eyes, which forbids changing it in place: that model has no such reference.
@pytest.mark.parametrize("name", [name for name in CASES if name != "in_place"])
def test_order_equals_that_of_hooks_on_real_tensors(name):
    module, args, loss = CASES[name]()
    real = order_on_real_tensors(module, args, loss)
    assert _order_of(trace_case(name)) == real
    assert {kind for kind, *_ in real} >= {"enter", "exit", "grad_ready", "param_grad"}


def test_a_module_may_change_its_input_in_place():
    log = _order_of(trace_case("in_place"))
    gradients = [name for kind, name, *_ in log if kind == "param_grad"]
    assert gradients == ["rest.1.bias", "rest.1.weight", "first.bias", "first.weight"]
    assert ("inputs_done", "rest", 0) in log, "although the first thing it does is to change its input"


@pytest.mark.parametrize("name", CASES)
def test_the_root_is_entered_with_the_batch(name):
    trace = trace_case(name)
    entry = trace["forwards"][0]
    assert entry["events"][0][:2] == ["enter", 0]
    entered = [entry["tensors"][tensor] for tensor in entry["events"][0][2]]
    assert [(t["shape"], t["storage"]) for t in entered] == [(i["shape"], i["storage"]) for i in trace["inputs"]]


def test_the_same_tensor_object_has_the_same_id_across_modules():
    trace = trace_case("llama")
    enters = {fqn_of(trace, e[1]): e[2] for e in events_of(trace) if e[0] == "enter"}
    exits = {fqn_of(trace, e[1]): e[2] for e in events_of(trace) if e[0] == "exit"}
    assert enters["layers.0"][0] == exits["embed"][0] == enters["layers.0.norm1"][0]
    assert enters["layers.1"][0] == exits["layers.0"][0]
    assert enters["layers.0"][1:] == enters["layers.2.attention"][1:], "cos and sin"
    assert exits[""] == exits["head"]


# ---- other shapes of a step ----


def test_recomputation_is_marked_and_its_storages_have_their_role():
    trace = trace_module(models.Llama(checkpointed=True), (tokens(),), options=Options(dtype="bfloat16"))
    backward = trace["backwards"][0]["events"]
    running, outermost, recomputed = [], [], 0
    for event in backward:
        if event[0] == "recompute_enter":
            outermost += [] if running else [fqn_of(trace, event[1])]
            running.append(fqn_of(trace, event[1]))
        elif event[0] == "recompute_exit":
            running = running[: running.index(fqn_of(trace, event[1]))]
        elif event[0] == "+":
            assert (event[3] == "recompute") == bool(running)
            recomputed += bool(running)
    assert recomputed > 0 and not running
    assert outermost == [f"layers.{i}" for i in (2, 1, 0)]
    plain = trace_module(models.Llama(), (tokens(),), options=Options(dtype="bfloat16"))
    batch, seq = 2, 32
    assert (
        saved_in(trace, "layers.1") == 2 * batch * seq * models.DIM < saved_in(plain, "layers.1")
    ), "only the block's output"


@pytest.mark.parametrize("early_stop", [True, False])
def test_modules_inside_a_recomputation_are_marked_and_an_early_stop_leaves_no_exit(early_stop):
    with set_checkpoint_early_stop(early_stop):
        trace = trace_module(models.Llama(checkpointed=True), (tokens(),), options=Options(dtype="bfloat16"))
    marks = [
        (e[0].removeprefix("recompute_"), fqn_of(trace, e[1]))
        for e in trace["backwards"][0]["events"]
        if e[0].startswith("recompute")
    ]
    first = marks[: marks.index(("exit", "layers.2")) + 1]
    assert first[:3] == [("enter", "layers.2"), ("enter", "layers.2.norm1"), ("exit", "layers.2.norm1")]
    left_open = {fqn for kind, fqn in first if kind == "enter"} - {fqn for kind, fqn in first if kind == "exit"}
    assert left_open == ({"layers.2.mlp", "layers.2.mlp.w2"} if early_stop else set())


def test_forward_alone_and_without_gradients():
    trace = trace_case("mlp", loss="none")
    assert trace["backwards"] == [] and trace["forwards"][0].get("grad_enabled", True)
    trace = trace_case("mlp", grad=False)
    assert trace["backwards"] == [] and trace["forwards"][0]["grad_enabled"] is False
    assert {e[3] for e in events_of(trace) if e[0] == "+"} <= {"forward_temp", "output"}


def test_several_steps_are_alike():
    trace = trace_case("llama", steps=2)
    first, second = (
        [
            (e[0], e[2], e[3]) if e[0] == "+" else tuple(e[:2])
            for e in p["events"]
            if e[0] != "-" and e[0] != "param_grad"
        ]
        for p in trace["backwards"]
    )
    assert first == second
    assert [p["forwards"] for p in trace["backwards"]] == [[0], [1]]


def test_output_is_the_same_bytes_in_every_process(tmp_path):
    texts = []
    for seed in ("0", "7"):
        path = tmp_path / f"{seed}.json"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "shardplan.tracer",
                "tracer_models:small_llama",
                "--seq",
                "32",
                "--dtype",
                "bfloat16",
                "-q",
                "-o",
                str(path),
            ],
            check=True,
            cwd=FOLDER,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT / "tools" / "python")},
        )
        texts.append(path.read_bytes())
    assert texts[0] == texts[1] and len(texts[0]) > 10_000
