# SPDX-License-Identifier: Apache-2.0
"""Kernels of the shipped stand-ins: their FLOPs next to plain implementations of transformers, their classes, and the
time that the simulator gives them."""

import importlib
import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, build_folder
from test_tracer_command import _operators
from test_tracer_stand_ins import SHIPPED, Call
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(ROOT / "tools" / "python"))

from shardplan.import_profile.kineto import Work  # noqa: E402
from shardplan.import_profile.parts import class_of  # noqa: E402
from shardplan.tracer.session import Options, trace_module  # noqa: E402

H, F = torch.bfloat16, torch.float32
BATCH, LENGTH, HEADS, KEY, VALUE, STATES, GROUPS, CHUNK = 2, 256, 4, 32, 16, 8, 4, 64
CHUNKS = LENGTH // CHUNK


def _traced(name, tensors, options):
    """The trace of a call of the function, and its operators, forward and backward."""
    trace = trace_module(Call(name, tensors, options), (torch.zeros(1),), options=Options(dtype=None))
    return trace, *([e for e in _operators(trace, passes) if e[2] == 0] for passes in ("forwards", "backwards"))


def _flops(events) -> int:
    return sum(e[4] for e in events if not e[1].startswith("aten."))


def _counted(reference, tensors) -> tuple[int, int]:
    """FLOPs of the matrix products of a plain implementation, forward and backward."""
    real = {name: torch.randn(shape).requires_grad_() for name, (shape, _) in tensors.items()}
    with FlopCounterMode(display=False) as forward:
        out = reference(*real.values())
    out = out[0] if isinstance(out, tuple) else out
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def _reference(model: str, function: str):
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), function).__wrapped__


def _products(keys=0, values=0, states=0, squares=0) -> int:
    """Products of a chunk of the delta rule, over all chunks and heads."""
    inner = (
        keys * CHUNK * CHUNK * KEY + values * CHUNK * CHUNK * VALUE + states * CHUNK * KEY * VALUE + squares * CHUNK**3
    )
    return 2 * BATCH * CHUNKS * HEADS * inner


# The kernels invert a chunk's triangle by 16 products of its blocks of 16 x 16, a quarter of one product of two such
# triangles as squares.
_SOLVE = _products(squares=1) // 4


def _delta_tensors(gate):
    by_head = (BATCH, LENGTH, HEADS)
    return {
        "q": ((*by_head, KEY), H), "k": ((*by_head, KEY), H), "v": ((*by_head, VALUE), H), "g": ((*by_head, *gate), F),
        "beta": (by_head, H),
    }


def test_the_gated_delta_rule_computes_the_products_of_a_plain_one(monkeypatch):
    """The kernels invert a chunk's triangle by products; the plain one sums up rows, which the counter does not see,
    and no more does it see their backward: two squares. The kernels' backward computes w, u, the states and two
    matrices of scores again. The plain one leaves out what leads to the first state and comes from the last: two
    products with a state each, in one chunk of them."""
    tensors = _delta_tensors(())
    reference = _reference("qwen3_next", "torch_chunk_gated_delta_rule")
    # By rows, not by a solver.
    monkeypatch.setattr(sys.modules[reference.__module__], "is_torchdynamo_exporting", lambda: True)
    forward, backward = _counted(reference, tensors)
    _, first, second = _traced("fla.ops.gated_delta_rule.chunk_gated_delta_rule", tensors, {})
    assert _flops(first) == forward + _SOLVE
    again = _products(keys=3, values=1, states=2) + _products(states=4) // CHUNKS
    assert _flops(second) == backward + again + _products(squares=2)


def test_kimi_delta_attention_computes_the_products_of_a_plain_one():
    """The same as above; the plain one sums up its scores elementwise, two products with the keys and four in the
    backward."""
    tensors = _delta_tensors((KEY,))
    forward, backward = _counted(_reference("kimi_linear", "chunk_kimi_delta_attention"), tensors)
    _, first, second = _traced("fla.ops.kda.chunk_kda", tensors, {})
    assert _flops(first) == forward + _products(keys=2) + _SOLVE
    again = _products(keys=1, values=1, states=2) + _products(states=4) // CHUNKS
    assert _flops(second) == backward + _products(keys=4) + again + _products(squares=2)


def test_the_chunked_scan_computes_the_products_of_a_plain_one():
    """The kernels pass states from chunk to chunk in one pass, where the plain one has a product over all pairs of
    chunks. In the backward they compute states, scores, and the product behind the gradient of the decays."""
    tensors = {"x": ((BATCH, LENGTH, HEADS, KEY), H), "dt": ((BATCH, LENGTH, HEADS), H), "A": ((HEADS,), F)}
    tensors |= {name: ((BATCH, LENGTH, GROUPS, STATES), H) for name in ("B", "C")}
    tensors |= {"D": ((HEADS,), H), "dt_bias": ((HEADS,), H)}
    options = {"chunk_size": CHUNK, "dt_softplus": True}
    reference = _reference("mamba2", "mamba2_chunk_scan")
    forward, backward = _counted(
        lambda x, dt, A, B, C, D, bias: reference(x, dt, A, B, C, CHUNK, D, bias, dt_softplus=True), tensors
    )
    _, first, second = _traced("mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined", tensors, options)
    pairs = 2 * BATCH * (CHUNKS + 1) ** 2 * HEADS * KEY * STATES
    states, scores, values = (
        2 * BATCH * CHUNKS * n
        for n in (HEADS * CHUNK * KEY * STATES, GROUPS * CHUNK * CHUNK * STATES, HEADS * CHUNK * CHUNK * KEY)
    )
    assert _flops(first) == forward - pairs
    assert _flops(second) == backward - 2 * pairs + states + scores + values


# ---- classes and times ----

# Kernels with FLOPs: does each multiply matrices, and of which dtype? KDA's scores are products in float32
# (chunk_intra.py).
KERNELS = {
    "causal_conv1d.causal_conv1d_fwd": ("other", "float32"),
    "causal_conv1d.causal_conv1d_bwd": ("other", "float32"),
    "mamba_ssm.selective_scan_fwd": ("other", "float32"),
    "mamba_ssm.selective_scan_bwd": ("other", "float32"),
    "mamba_ssm.chunk_state_fwd": ("matmul", "bfloat16"),
    "mamba_ssm.bmm_chunk_fwd": ("matmul", "bfloat16"),
    "mamba_ssm.chunk_scan_fwd": ("matmul", "bfloat16"),
    "mamba_ssm.chunk_scan_bwd_dstates": ("matmul", "bfloat16"),
    "mamba_ssm.chunk_scan_chunk_state_bwd_dx": ("matmul", "bfloat16"),
    "mamba_ssm.chunk_state_bwd_db": ("matmul", "bfloat16"),
    "mamba_ssm.chunk_scan_bwd_dc": ("matmul", "bfloat16"),
    "mamba_ssm.chunk_scan_bwd_dcb": ("matmul", "bfloat16"),
    "mamba_ssm.bmm_chunk_bwd": ("matmul", "bfloat16"),
    "mamba_ssm.chunk_scan_bwd_ddAcs": ("matmul", "bfloat16"),
    "fla.chunk_gated_delta_rule_fwd_kkt_solve": ("matmul", "bfloat16"),
    "fla.recompute_w_u_fwd": ("matmul", "bfloat16"),
    "fla.chunk_gated_delta_rule_fwd_h": ("matmul", "bfloat16"),
    "fla.chunk_fwd_o": ("matmul", "bfloat16"),
    "fla.chunk_bwd_dv_local": ("matmul", "bfloat16"),
    "fla.chunk_gated_delta_rule_bwd_dhu": ("matmul", "bfloat16"),
    "fla.chunk_bwd_dqkwg": ("matmul", "bfloat16"),
    "fla.prepare_wy_repr_bwd": ("matmul", "bfloat16"),
    "fla.chunk_kda_fwd_intra_token_parallel": ("other", "float32"),
    "fla.chunk_kda_fwd_inter_solve_fused": ("matmul", "float32"),
    "fla.recompute_w_u_fwd_kda": ("matmul", "bfloat16"),
    "fla.chunk_gla_fwd_o_gk": ("matmul", "bfloat16"),
    "fla.chunk_kda_bwd_dAv": ("matmul", "bfloat16"),
    "fla.chunk_kda_bwd_wy_dqkg_fused": ("matmul", "bfloat16"),
    "fla.chunk_kda_bwd_intra": ("matmul", "float32"),
}
# Kernels without FLOPs: the norms are norms, the others only move bytes.
NORMS = {"fla.l2norm_fwd", "fla.l2norm_bwd", "mamba_ssm.layer_norm_gated_fwd", "mamba_ssm.layer_norm_gated_bwd"}

RATES = {"matmul": {"bfloat16": 10**11, "float32": 10**10}, "vector": 10**8, "memory": 10**9}


def _cluster(path):
    rates = [{"dtype": dtype, "flops_per_second": rate} for dtype, rate in RATES["matmul"].items()]
    device = {
        "name": "plain", "memory_bytes": 1 << 40, "memory_bytes_per_second": RATES["memory"],
        "vector_flops_per_second": RATES["vector"],
    }
    path.write_text(
        json.dumps(
            {"schema": "shardplan.cluster/1", "name": "plain", "ranks": 1, "device": {**device, "matmul": rates}}
        )
    )


def _duration(event, kind) -> int:
    dtype, flops, read, written = event[3:7]
    rate = RATES["matmul"][dtype] if kind == "matmul" else RATES["vector"]
    return max(-(-flops * 10**9 // rate), -(-(read + written) * 10**9 // RATES["memory"]))


def _profiled_as(name: str) -> str:
    """The class of a kernel's operator in a profile."""
    work = Work.__new__(Work)
    object.__setattr__(work, "operators", [name.replace(".", "::", 1)])
    object.__setattr__(work, "name", name)
    return class_of(work)


@pytest.mark.parametrize("kind", SHIPPED)
def test_the_simulator_times_each_kernel_by_its_class(kind, tmp_path):
    name, tensors, options, *_ = SHIPPED[kind]()
    trace = _traced(name, tensors, options)[0]
    expected: dict = {}
    for phase in ("forward", "backward"):
        for event in _operators(trace, f"{phase}s"):
            of = _profiled_as(event[1])
            if not event[1].startswith("aten."):
                assert (of, event[3]) == (
                    KERNELS[event[1]] if event[4] else ("normalization" if event[1] in NORMS else "other", event[3])
                ), event[1]
            count, busy = expected.get((phase, of), (0, 0))
            expected[phase, of] = count + 1, busy + _duration(event, of)
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    _cluster(tmp_path / "cluster.json")
    program = build_folder() / "bin" / "shardplan"
    subprocess.run(
        [program, "plan", "trace.json", "--cluster", "cluster.json", "-q", "-o", "plan.json"], cwd=tmp_path, check=True
    )
    subprocess.run(
        [program, "simulate", "plan.json", "--report", "report.json", "-q"],
        cwd=tmp_path,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    simulated = {
        (o["phase"], o["kind"]): (o["count"], o["busy_ns"])
        for o in json.loads((tmp_path / "report.json").read_text())["operators"]
    }
    of_kernels = {key: value for key, value in expected.items() if key[1] in ("matmul", "normalization", "other")}
    assert of_kernels == {key: value for key, value in simulated.items() if key in of_kernels}
