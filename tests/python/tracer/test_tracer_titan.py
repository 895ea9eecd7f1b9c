# SPDX-License-Identifier: Apache-2.0
"""torchtitan's debug models, as one rank of each parallelism traces them: the FLOPs are those of the whole model."""

import functools
import importlib.util
import json

import pytest
import warm
from test_tracer_distributed import COMMAND, HERE, flops_by_module

MISSING = [name for name in ("torchtitan", "typeguard") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

DENSE = ("tp4", "cp4", "cp2_tp2")
SPARSE = ("tp4", "ep4", "cp4", "tp4_ep4", "cp2_tp2_ep4")
MODELS = {
    "llama3": DENSE,
    "qwen3": DENSE,
    "qwen3_moe": SPARSE,
    "deepseek_v3": SPARSE,
    "gpt_oss": SPARSE,
}
BACKENDS = ("partial_dtensor", "spmd_types")
CASES = [(model, degrees, backend) for model, all_degrees in MODELS.items() for degrees in all_degrees
         for backend in BACKENDS]
# Low-rank projections of MLA, and gates where tokens are not cut: each rank of tensor parallelism computes them whole.
REPLICATED = ("attention.wq_a", "attention.wkv_a", "moe.router.gate")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("titan")

    @functools.cache
    def of(model, backend, degrees, attention="flex"):
        file = folder / f"{model}{backend}{degrees}{attention}.json"
        routing = [] if MODELS[model] is DENSE else ["--routing", "balanced"]
        name = f"tracer_titan:{model}__{backend}__{degrees}__{attention}"
        words = [name, "-q", "-o", file, "--batch", "2", "--seq", "512", *routing]
        done = warm.run(["-c", COMMAND, *words], cwd=HERE, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(file.read_text())

    return of


@pytest.mark.parametrize("backend", BACKENDS)
def test_varlen_attention_is_one_kernel_each_way(backend, trace):
    """Its masks read values, so that the model is built on the CPU; FlashAttention 3 is not installed."""
    packed, dense = (trace("llama3", backend, "tp2", attention) for attention in ("varlen", "sdpa"))
    assert sum(flops_by_module(packed).values()) == sum(flops_by_module(dense).values()) > 0
    names = [e[1] for kind in ("forwards", "backwards") for p in packed[kind] for e in p["events"] if e[0] == "op"]
    layers = sum(module["class_name"] == "VarlenAttention" for module in packed["modules"])
    assert layers > 0
    assert names.count("torch_attn._varlen_attn") == names.count("torch_attn._varlen_attn_backward") == layers


def test_a_compiled_loss_is_traced_as_written(trace, tmp_path):
    file = tmp_path / "compiled.json"
    words = ["tracer_titan:compiled_loss", "-q", "-o", file, "--batch", "2", "--seq", "512"]
    done = warm.run(["-c", COMMAND, *words], cwd=HERE, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    compiled, written = json.loads(file.read_text()), trace("llama3", "spmd_types", "tp4")
    assert compiled["forwards"] == written["forwards"] and compiled["backwards"] == written["backwards"]


def test_what_torchtitan_refuses_is_its_own_error(tmp_path):
    words = ["tracer_titan:sdpa_context_parallel", "-q", "-o", tmp_path / "none.json", "--batch", "2", "--seq", "512"]
    done = warm.run(["-c", COMMAND, *words], cwd=HERE, timeout=600)
    assert done.returncode == 3
    assert "spmd_types + CP is not supported with ScaledDotProductAttention" in done.stderr


def size(degrees, dimension):
    return next((int(word[len(dimension):]) for word in degrees.split("_") if word.startswith(dimension)), 1)


@pytest.mark.parametrize("model, degrees, backend", CASES)
def test_the_flops_of_all_ranks_are_the_models(model, degrees, backend, trace):
    """Ranks of experts alone have batches of their own."""
    whole, cut = (flops_by_module(trace(model, backend, d)) for d in ("whole1", degrees))
    ranks = size(degrees, "tp") * size(degrees, "cp")
    assert sum(whole.values()) > 0
    for fqn, count in whole.items():
        replicated = count and fqn.endswith(REPLICATED) and cut[fqn] * ranks != count
        assert cut[fqn] * (size(degrees, "cp") if replicated else ranks) == count, fqn


@pytest.mark.parametrize("model, degrees, backend", CASES)
def test_the_groups_are_those_of_the_parallelism(model, degrees, backend, trace):
    found = trace(model, backend, degrees)
    names = {entry["name"]: entry["size"] for entry in found["communicators"]}
    for dimension in ("tp", "cp", "ep"):
        if size(degrees, dimension) > 1:
            assert names[dimension] == size(degrees, dimension), names
    assert found.get("same_batch", []) == (["tp"] if size(degrees, "tp") > 1 else [])
    used = {
        found["communicators"][event[11]["communicator"]]["name"]
        for entry in (*found["forwards"], *found["backwards"]) for event in entry["events"] if len(event) > 11
    }
    assert used == {d for d in ("tp", "cp", "ep") if size(degrees, d) > 1}

