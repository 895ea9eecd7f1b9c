# SPDX-License-Identifier: Apache-2.0
"""Traces of compiled blocks, against compiled blocks that run on real tensors of the CPU."""

import functools
import json
import os
import re
import subprocess

import compiled_blocks as blocks
import pytest
import torch
from conftest import build_folder
from torch._inductor import metrics
from tracer_support import events_of, fqn_of, passes

from shardplan.tracer import document
from shardplan.tracer.errors import TracerError
from shardplan.tracer.fused import KERNEL
from shardplan.tracer.session import Options, trace_module

COMMAND = build_folder() / "bin" / "shardplan"
ALL = [
    (name, dtype)
    for name in blocks.BLOCKS
    for dtype in ("float32", "bfloat16")
    # The CPU's layer norm keeps its statistics in bfloat16, a device's in float32.
    if (name, dtype) != ("gelu", "bfloat16")
]
SOME = [case for case in ALL if case[0] in ("gated", "decoder") or case[1] == "float32" and case[0] != "attention"]
CASES = ALL if os.environ.get("SHARDPLAN_ALL_SETTINGS") else SOME  # the rest: tools/nightly
ON_REAL_TENSORS = [  # of inductor, which takes seconds for each
    ("gelu", "float32"),
    ("gated", "float32"),
    ("softmax", "float32"),
    ("decoder", "bfloat16"),
    ("checkpointed decoder", "float32"),
    ("selectively checkpointed gated", "bfloat16"),
]


@pytest.fixture(scope="module", autouse=True)
def _inductor_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def compile_blocks(model, backend, way):
    for number, layer in enumerate(model.layers):
        if way == "wrapper":
            model.layers[number] = torch.compile(layer, backend=backend, fullgraph=True)
        elif way == "method":
            layer.compile(backend=backend, fullgraph=True)
    return model


@functools.cache
def trace_of(name, backend, dtype, way="wrapper", **options):
    """The trace of the stack with compiled blocks: shared among tests, not to be changed."""
    torch._dynamo.reset()
    model = compile_blocks(blocks.Stack(blocks.BLOCKS[name]), backend, way)
    if way == "options":
        options |= {"compile": ["layers.*"], "compile_backend": backend}
    return trace_module(
        model, (torch.zeros(blocks.BATCH, blocks.SEQ, blocks.DIM),), options=Options(dtype=dtype, **options)
    )


def module_of(trace, fqn):
    return next(i for i, entry in enumerate(trace["modules"]) if entry["fqn"] == fqn)


def saved_in_trace(trace, fqn):
    """Sizes of what is born in the module and saved. Left out: its output, and the random state of attention, which the
    CPU's kernel has not."""
    forward, module = trace["forwards"][0], module_of(trace, fqn)
    outputs = {forward["tensors"][t]["storage"] for e in forward["events"] if e[:2] == ["exit", module] for t in e[2]}
    return sorted(
        e[2]
        for e in forward["events"]
        if e[0] == "+" and e[3] == "saved" and e[4] == module and e[1] not in outputs and e[2] > 16
    )


def compiled_on_real_tensors(name, backend, dtype):
    torch._dynamo.reset()
    block = torch.compile(blocks.BLOCKS[name]().to(getattr(torch, dtype)), backend=backend, fullgraph=True)
    return block, torch.randn(blocks.BATCH, blocks.SEQ, blocks.DIM, dtype=getattr(torch, dtype), requires_grad=True)


def saved_on_real_tensors(name, backend, dtype):
    """Sizes of the storages that a compiled block makes in a forward and saves; its output left out."""
    block, x = compiled_on_real_tensors(name, backend, dtype)
    block(x)  # compiles; hooks that are there then would be part of the graph
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = block(x)
    outside = {t.untyped_storage()._cdata for t in (x, output, *block.parameters())}
    # Kept for operators that run again; of a CUDA device it is on the host.
    random_state = torch.get_rng_state().numel()
    made = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in saved
        if (t.dtype, t.numel()) != (torch.uint8, random_state)
    }
    return sorted(size for storage, size in made.items() if storage not in outside)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_saved_tensors_are_those_of_aot_eager(name, dtype):
    assert saved_in_trace(trace_of(name, "aot_eager", dtype), "layers.1") == saved_on_real_tensors(
        name, "aot_eager", dtype
    )


@pytest.mark.parametrize(("name", "dtype"), ON_REAL_TENSORS)
def test_saved_tensors_are_those_of_inductor(name, dtype):
    assert saved_in_trace(trace_of(name, "inductor", dtype), "layers.1") == saved_on_real_tensors(
        name, "inductor", dtype
    )


def test_fewer_tensors_are_saved_than_as_written():
    compiled, written = (
        saved_in_trace(trace_of("gated", "inductor", "float32", **options), "layers.1")
        for options in ({}, {"ignore_compile": True})
    )
    assert not written  # its operators are in modules below
    whole = sum(
        e[2]
        for e in events_of(trace_of("gated", "inductor", "float32", ignore_compile=True))
        if e[0] == "+" and e[3] == "saved"
    )
    assert sum(compiled) < whole / 3


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["decoder", "checkpointed decoder"])
def test_equal_blocks_have_equal_traces(name, backend):
    trace = trace_of(name, backend, "bfloat16")

    def seen(fqn):
        module = module_of(trace, fqn)
        chosen = [e for e in events_of(trace) if e[0] in ("op", "+") and e[2 if e[0] == "op" else 4] == module]
        return [e[1:2] + e[3:7] if e[0] == "op" else e[2:4] for e in chosen]

    assert seen("layers.0") == seen("layers.1") == seen("layers.2") != []


def test_however_a_block_is_compiled_the_trace_is_the_same():
    traces = [json.dumps(trace_of("decoder", "inductor", "bfloat16", way)) for way in ("wrapper", "method", "options")]
    assert traces[0] == traces[1] == traces[2]


@pytest.mark.parametrize("name", ["decoder", "checkpointed gelu"])
def test_what_the_trace_says_of_compiled_modules(name):
    trace = trace_of(name, "inductor", "float32")
    assert [m["fqn"] for m in trace["modules"] if m.get("compiled") == "inductor"] == [
        "layers.0", "layers.1", "layers.2",
    ]
    assert not [m["fqn"] for m in trace["modules"] if re.search("_orig_mod|_checkpoint_wrapped_module", m["fqn"])]
    entered = {fqn_of(trace, e[1]) for e in events_of(trace) if e[0] == "enter"}
    assert entered == {"", "first", "layers.0", "layers.1", "layers.2", "last"}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiler_holds_no_tensor_of_the_step(backend):
    events = events_of(trace_of("decoder", backend, "bfloat16"))
    left = {e[1] for e in events if e[0] == "+"} - {e[1] for e in events if e[0] == "-"}
    assert left == {e[1] for e in events if e[0] == "+" and e[3] == "parameter_grad"}


@pytest.mark.parametrize("name", ["gated", "gelu", "softmax", "decoder"])
def test_bytes_are_those_that_inductor_counts(name):
    """Inductor's own count of what the kernels of a graph read and write. On the CPU it copies some operands of
    products first."""
    trace = trace_of(name, "inductor", "float32")
    module = module_of(trace, "layers.1")
    ours = [sum(e[5] + e[6] for e in p["events"] if e[0] == "op" and e[2] == module) for p in passes(trace)]
    torch._logging.set_logs(inductor_metrics=True)
    try:
        metrics.reset()
        with torch._inductor.config.patch(force_disable_caches=True):
            block, x = compiled_on_real_tensors(name, "inductor", "float32")
            output = block(x)
            forward = metrics.num_bytes_accessed
            output.sum().backward()
    finally:
        torch._logging.set_logs()
    theirs = [forward, metrics.num_bytes_accessed - forward]
    assert ours == pytest.approx(theirs, rel=0.12)


def test_a_pattern_that_means_nothing():
    with pytest.raises(TracerError, match="--compile blocks.\\*: no module below the root has that name"):
        trace_module(
            blocks.Stack(blocks.Gated), (torch.zeros(1, 2, blocks.DIM),), options=Options(compile=["blocks.*"])
        )


# ---- what is made of such a trace ----


def run_command(folder, *arguments, code=0):
    done = subprocess.run([COMMAND, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def written(tmp_path):
    def write(**options):
        with open(tmp_path / "t.json", "w") as file:
            document.write(trace_of("decoder", "inductor", "bfloat16", **options), file)
        return tmp_path

    return write


def test_a_plan_verifies_and_is_simulated(written):
    folder = written()
    run_command(folder, "plan", "t.json", "--cluster", "h100_sxm_8", "--unit", "layers.*", "-o", "p.json")
    run_command(folder, "validate", "p.json")
    run_command(folder, "simulate", "p.json")
    run_command(
        folder, "plan", "t.json", "--cluster", "h100_sxm_8", "--unit", "layers.*", "--checkpoint", "layers.*", "-o",
        "c.json",
    )
    run_command(folder, "validate", "c.json")


def test_a_unit_inside_of_a_compiled_module_is_refused(written):
    said = run_command(written(), "plan", "t.json", "--ranks", "2", "--unit", "layers.*.block", "-o", "p.json", code=3)
    assert "a unit lies inside of a compiled module" in said and "layers.0.block" in said
