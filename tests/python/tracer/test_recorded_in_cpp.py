# SPDX-License-Identifier: Apache-2.0
"""Traces that C++ records of LibTorch models (docs/internals/trace-recorder.md), next to the tracer's of their twins in
Python.

They are equal, events, numbers of storages and names included, but for where C++ lets go of tensors and Python does
not:
- a temporary of C++ lives until its statement ends, an argument until the callee returns: `release` events stand
  elsewhere,
- several storages that die between two operators may die in another order.
"""

import functools
import itertools
import json
import subprocess

import pytest
import recorded_twins
import torch
from conftest import build_folder, installed_pytorch
from torch.utils.flop_counter import flop_registry

from shardplan.tracer import document, operators
from shardplan.tracer.record import Call, Group
from shardplan.tracer.session import Options, trace_callable, trace_groups

# name -> a twin that is called once
TWINS = "convolutional detached frozen gpt in_place indexed masked reused tied twice_inside unused_input".split()


def _record_model(*arguments: str) -> str:
    program = build_folder() / "tests" / "executor" / "record_model"
    if not program.exists():
        pytest.fail(f"{program} is not built: run tools/build dev, or set SHARDPLAN_BUILD")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True, timeout=120).stdout


@functools.cache
def recorded(name: str, device: str = "cpu") -> dict:
    return json.loads(_record_model(name, device))


def _as_written(trace: dict) -> dict:
    return json.loads("".join(document.lines(trace)))


@functools.cache
def traced(name: str, **options: str) -> dict:
    return _as_written(trace_callable(getattr(recorded_twins, name), name, Options(**{"sdpa": "cpu", **options})))


def without_lifetimes_of_names(trace: dict) -> dict:
    """Without what the module's text says may differ, and without what names the trace."""
    result = {key: value for key, value in trace.items() if key not in ("model", "source", "recorded_with")}
    for kind in ("forwards", "backwards"):
        result[kind] = []
        for entry in trace.get(kind, []):
            events = [event for event in entry["events"] if event[0] != "release"]
            groups = itertools.groupby(events, lambda event: event[0] == "-")
            ordered = [event for dies, group in groups for event in (sorted(group) if dies else group)]
            result[kind].append({**entry, "events": ordered})
    return result


def released(trace: dict) -> list[list[int]]:
    return [sorted(event[1] for event in entry["events"] if event[0] == "release") for entry in trace["forwards"]]


@pytest.mark.parametrize("name", TWINS)
def test_equals_the_tracers(name):
    assert without_lifetimes_of_names(recorded(name)) == without_lifetimes_of_names(traced(name))
    assert released(recorded(name)) == released(traced(name))


@pytest.mark.parametrize("name", ["gpt", "dropping", "masked", "in_place", "indexed", "twice_inside"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_of_a_gpu_equal_the_tracers(name, dtype):
    """By default the tracer's kernels are those of a GPU: `--sdpa auto`."""
    own = traced(name, sdpa="auto", dtype=dtype)
    theirs = recorded(name, "gpu" if dtype == "float32" else "gpu_bfloat16")
    parameters = [{**parameter, "dtype": dtype} for parameter in own["parameters"]]  # C++ has those of the computation
    assert without_lifetimes_of_names(theirs) == without_lifetimes_of_names({**own, "parameters": parameters})
    assert theirs["recorded_with"] == own["recorded_with"]
    assert released(theirs) == released(own)


@pytest.mark.parametrize("name", ["two_forwards", "two_steps"])
def test_several_forwards_equal_the_tracers(name):
    module, args, loss = recorded_twins.twice_inside()
    call = Call(args, {})
    groups = [Group([call, call])] if name == "two_forwards" else [Group([call])] * 2
    own = _as_written(trace_groups(module, groups, loss, Options(sdpa="cpu")))
    assert without_lifetimes_of_names(recorded(name)) == without_lifetimes_of_names(own)


def test_a_forward_without_gradients_equals_the_tracers():
    """The tracer's has no loss."""
    module, args, _ = recorded_twins.gpt()
    own = _as_written(trace_groups(module, [Group([Call(args, {})])], None, Options(sdpa="cpu", grad=False)))

    def events(trace):
        (forward,) = without_lifetimes_of_names(trace)["forwards"]
        assert forward["grad_enabled"] is False and "backwards" not in trace
        kinds = [e[:3] if e[0] == "+" else e for e in forward["events"] if e[0] != "-"]
        return kinds[: next(i for i, e in enumerate(kinds) if e[:2] == ["exit", 0])]

    assert events(recorded("gpt_no_grad")) == events(own)


def test_dropout_is_that_of_the_cpu():
    """A GPU has one kernel, and saves a byte per element; LibTorch's dropout on the CPU draws a mask of floats."""

    def saved_bytes(trace):
        return {event[2] for event in trace["forwards"][0]["events"] if event[0] == "+" and event[3] == "saved"}

    assert (saved_bytes(recorded("dropping")), saved_bytes(traced("dropping"))) == ({4 * 8 * 4}, {4 * 8})


def test_python_holds_arguments_longer():
    """The same storages are released; C++ releases an argument that it was given in the callee, Python behind the
    call."""

    def releases_behind_exits(trace):
        events = trace["forwards"][0]["events"]
        return sum(a[0] == "exit" and b[0] == "release" for a, b in itertools.pairwise(events))

    assert releases_behind_exits(traced("gpt")) > releases_behind_exits(recorded("gpt"))


# ---- plans ----


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Both traces of the GPT, under one name."""
    folder = tmp_path_factory.mktemp("traces")
    for kind, trace in (("cpp", recorded("gpt")), ("python", traced("gpt"))):
        (folder / f"{kind}.json").write_text(
            json.dumps(
                {**trace, "model": "gpt", "source": "", "recorded_with": f"torch {torch.__version__.split('+')[0]}"}
            )
        )
    return folder


@pytest.mark.parametrize(
    "options",
    [
        ("--policy", "fsdp2"),
        ("--policy", "fsdp2", "--checkpoint", "blocks.*", "--param-dtype", "bfloat16"),
        ("--policy", "fsdp1", "--backward-prefetch", "pre"),
    ],
    ids=["fsdp2", "checkpointed", "fsdp1"],
)
def test_plans_are_equal(shardplan, documents, options):
    simulated = {}
    for kind in ("cpp", "python"):
        plan = documents / f"{kind}.plan.json"
        made = shardplan(
            "plan", documents / f"{kind}.json", "--cluster", "h100_sxm_8", "--unit", "blocks.*", *options, "-q", "-o",
            plan,
        )
        assert made.returncode == 0, made.stderr
        checked = shardplan("validate", plan)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        simulated[kind] = shardplan("simulate", plan).stdout
    assert simulated["cpp"] == simulated["python"] and "reserved" in simulated["cpp"]
    texts = {kind: json.loads((documents / f"{kind}.plan.json").read_text()) for kind in simulated}
    for part in ("units", "buffers", "streams", "instructions", "strategy"):
        assert texts["cpp"].get(part) == texts["python"].get(part), part


def test_an_optimized_plan_of_it(shardplan, documents):
    plan = documents / "optimized.json"
    made = shardplan(
        "optimize", documents / "cpp.json", "--cluster", "h100_sxm_8", "--memory-budget", "device", "-q", "-o", plan
    )
    assert made.returncode == 0, made.stderr
    assert shardplan("validate", plan).returncode == 0


# ---- the tables of operators ----


def test_tables_are_the_tracers():
    ours: dict[str, set] = {}
    for line in _record_model("tables").splitlines():
        table, *entry = line.split()
        ours.setdefault(table, set()).add(tuple(entry))
    assert ours["allocate_only"] == {(name,) for name in operators._ALLOCATE_ONLY}
    assert ours["reads_nothing"] == {(name,) for name in operators._READS_NOTHING}
    assert ours["lookup"] == {(name, str(position)) for name, position in operators._LOOKUPS.items()}
    assert ours["unread"] == {
        (name, str(position)) for name, positions in operators._UNREAD.items() for position in positions
    }
    counted = {packet.__name__ for packet in flop_registry if str(packet).startswith("aten.")}
    inside_of_attention = {
        f"_{kind}_attention_{way}" for kind in ("flash", "efficient") for way in ("forward", "backward")
    }
    without_formula = {"_grouped_mm", "_cudnn_rnn", "_cudnn_rnn_backward"}  # the tracer's own
    flops = {name for (name,) in ours["flops"]}
    assert counted - inside_of_attention <= flops
    if installed_pytorch() == "2.15":
        assert flops == counted - inside_of_attention | without_formula
