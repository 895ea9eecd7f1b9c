# SPDX-License-Identifier: Apache-2.0
"""Stand-ins of fused kernels: what the shipped ones cost, hybrids of transformers, a user's own."""

import math
import sys

import pytest
import torch
from conftest import ROOT
from test_tracer_command import SMALL, _config, _operators, _trace
from torch import nn

sys.path.insert(0, str(ROOT / "tools" / "python"))

from shardplan.tracer import cli, stand_ins  # noqa: E402
from shardplan.tracer.session import Options, trace_module  # noqa: E402


class Call(nn.Module):
    """A function of parameters and buffers (which keep float32) alone, so that every storage of the trace is one that
    the function made."""

    def __init__(self, name, tensors, options):
        super().__init__()
        self.name, self.options = name, options
        for key, (shape, dtype) in tensors.items():
            tensor = torch.empty(shape, dtype=dtype)
            self.register_buffer(key, tensor) if dtype == F else self.register_parameter(key, nn.Parameter(tensor))

    def forward(self, unused):
        path, _, function = self.name.rpartition(".")
        out = getattr(sys.modules[path], function)(
            **dict(self.named_parameters()), **dict(self.named_buffers()), **self.options
        )
        return out[0] if isinstance(out, tuple) else out


def _bmm(*products):
    """FLOPs of products (count, m, n, k)."""
    return sum(2 * count * m * n * k for count, m, n, k in products)


def _bytes(*tensors):
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors)


H, F = torch.bfloat16, torch.float32


def _conv():
    """causal_conv1d 1.6.1: a product of each element with the taps; the backward has the gradients of x and of the
    taps, and SiLU's needs the output (csrc/causal_conv1d_bwd.cu)."""
    b, d, l, w = 2, 24, 96, 4
    tensors = {"x": ((b, d, l), H), "weight": ((d, w), H), "bias": ((d,), H)}
    one = 2 * b * d * l * w
    moved = _bytes(*tensors.values(), tensors["x"])
    return "causal_conv1d.causal_conv1d_fn", tensors, {"activation": "silu"}, one, 3 * one, 0, moved


def _scan():
    """mamba_ssm 2.3.2, csrc/selective_scan/selective_scan.cpp: float32 pairs of the state behind every 2,048 steps, and
    the output before the gate. FLOPs of a step, channel and state are those of selective_scan_{fwd,bwd}_kernel.cuh,
    whose block scan applies its operator of 3 twice to an item. Forward: delta A and its exponential, B delta u, scan,
    times C, sum. Backward: those, but for the output, and dout C; both scans; du 2, its factor 1, ddelta 5, the state
    before 1; dA 3; dB 2, dC 1, and two sums in memory."""
    b, d, l, n = 2, 16, 4100, 8
    tensors = {name: ((b, d, l), H) for name in ("u", "delta", "z")}
    tensors |= {"A": ((d, n), F), "B": ((b, n, l), H), "C": ((b, n, l), H), "D": ((d,), F), "delta_bias": ((d,), F)}
    flops, backward = (b * l * d * n * each for each in (2 + 1 + 6 + 2, 5 + 12 + 9 + 3 + 3 + 2))
    saved = _bytes(((b, d, 3, 2 * n), F), ((b, d, l), H))
    moved = _bytes(*tensors.values()) + saved + _bytes(tensors["z"])
    return "mamba_ssm.ops.selective_scan_interface.selective_scan_fn", tensors, {}, flops, backward, saved, moved


def _inner():
    """mamba_ssm 2.3.2, MambaInnerFn: saves what x_proj gives, B and C, the states, the scan's output; convolution and
    time steps are made again. The output projection is a product of the function, too."""
    b, d, l, n, r, e, w = 2, 32, 64, 4, 3, 16, 4
    tensors = {
        "xz": ((b, 2 * d, l), H), "conv1d_weight": ((d, 1, w), H), "conv1d_bias": ((d,), H),
        "x_proj_weight": ((r + 2 * n, d), H),
    }
    tensors |= {
        "delta_proj_weight": ((d, r), H), "out_proj_weight": ((e, d), H), "A": ((d, n), F), "D": ((d,), F),
        "delta_bias": ((d,), F),
    }
    tensors["out_proj_bias"] = ((e,), H)
    conv, scan, scan_backward = 2 * b * d * l * w, b * l * d * n * 11, b * l * d * n * 34
    step = _bmm((1, d, b * l, r))
    projections = _bmm((1, b * l, r + 2 * n, d), (1, b * l, e, d)) + step
    saved = _bytes(((b * l, r + 2 * n), H), *[((b, n, l), H)] * 2, ((b, d, 1, 2 * n), F), ((b, d, l), H))
    backward = 2 * projections + step + (1 + 3) * conv + scan_backward
    return (
        "mamba_ssm.ops.selective_scan_interface.mamba_inner_fn",
        tensors,
        {},
        projections + conv + scan,
        backward,
        saved,
        None,
    )


def _dual(z=False):
    """mamba_ssm 2.3.2, ops/triton/ssd_combined.py: C B of each group and chunk, states of each chunk, the output from
    scores and from states. The backward makes scores and states again. tl.dot of the kernels: dstates; dx of scores and
    states; dB; dC; dCB; C's and B's gradients of dCB; ddA of scores."""
    b, l, h, p, g, n, q = 2, 100, 4, 8, 2, 16, 32
    c = math.ceil(l / q)
    tensors = {
        "x": ((b, l, h, p), H), "dt": ((b, l, h), H), "A": ((h,), F), "B": ((b, l, g, n), H), "C": ((b, l, g, n), H),
        "D": ((h,), H),
    }
    tensors["dt_bias"] = ((h,), H)
    scores, states, values = _bmm((b * c * g, q, q, n)), _bmm((b * h, l, n, p)), _bmm((b * h, l, q, p))
    kept = [((b, h, c, q), F), ((b, l, h, p), H)]
    if z:
        tensors["z"] = tensors["x"]
        kept.append(tensors["x"])  # the output before the gate, and the output that is the model's
    sums, of_states, passed, of_scores = (
        ((b, h, c, q), F),
        ((b, c, h, p, n), F),
        ((b, c, h, p, n), H),
        ((b, c, g, q, q), F),
    )
    moved = _bytes(tensors["dt"], tensors["A"], tensors["dt_bias"], sums, sums)
    moved += _bytes(tensors["B"], tensors["x"], sums, sums, of_states)
    moved += _bytes(of_states, ((b, h, c), F), passed, ((b, h, p, n), F))
    moved += _bytes(tensors["C"], tensors["B"], of_scores)
    moved += _bytes(
        of_scores, tensors["x"], sums, sums, tensors["C"], passed, tensors["D"], tensors["x"]
    ) + 2 * z * _bytes(tensors["x"])
    backward = 3 * scores + 5 * states + 3 * values
    saved = _bytes(sums, tensors["x"])
    name = "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined"
    return name, tensors, {"chunk_size": q, "dt_softplus": True}, scores + 2 * states + values, backward, saved, moved


def _split():
    """mamba_ssm 2.3.2, MambaSplitConv1dScanCombinedFn: saves the scan's output and the norm's 1 / rms alone (and its
    arguments). The norm's output is made again for the gradient of the output projection."""
    b, l, h, p, g, n, q, w, e = 1, 64, 4, 8, 1, 16, 32, 4, 24
    width, c = h * p + 2 * g * n, 2
    tensors = {
        "zxbcdt": ((b, l, h * p + width + h), H), "conv1d_weight": ((width, w), H), "conv1d_bias": ((width,), H),
        "dt_bias": ((h,), H),
    }
    tensors |= {"A": ((h,), F), "D": ((h,), H), "rmsnorm_weight": ((h * p,), H), "outproj_weight": ((e, h * p), H)}
    conv, projection = 2 * b * l * width * w, _bmm((1, b * l, e, h * p))
    scores, states, values = _bmm((b * c * g, q, q, n)), _bmm((b * h, l, n, p)), _bmm((b * h, l, q, p))
    forward = conv + scores + 2 * states + values + projection
    backward = (1 + 3) * conv + 3 * scores + 5 * states + 3 * values + 2 * projection
    saved = _bytes(((b, l, h, p), H), ((g * b * l,), F))
    name = "mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined"
    return name, tensors, {"chunk_size": q, "headdim": p, "ngroups": g}, forward, backward, saved, None


def _delta(channels):
    """flash-linear-attention 0.5.2, fla/ops/gated_delta_rule/chunk.py and fla/ops/kda/chunk.py: saves normed queries
    and keys with 1 / rms, the decay's sums in float32, and the scores of a chunk (KDA: two of them). Products are
    tl.dot of the kernels, in the order in which the functions launch them."""
    B, T, H_, HV, K, V, BT = 1, 130, 2, 2 if channels else 4, 16, 32, 64
    NT = math.ceil(T / BT)
    tensors = {"q": ((B, T, H_, K), H), "k": ((B, T, H_, K), H), "v": ((B, T, HV, V), H), "beta": ((B, T, HV), H)}
    tensors["g"] = ((B, T, HV, K) if channels else (B, T, HV), H)
    state, keys, values, scores = (_bmm((B * HV, T, m, n)) for m, n in ((K, V), (BT, K), (BT, V), (BT, BT)))
    solve = B * HV * NT * BT**3 // 2  # 16 products of blocks of 16 (kkt_solve, inter_solve_fused)
    forward = solve + (keys + keys + values) + 2 * state + (state + keys + values)
    again = (keys + values) + 2 * state
    of_states = 3 * state
    if channels:
        backward = again + 2 * values + of_states + (3 * state + 2 * keys + 2 * values + 2 * scores) + 4 * keys
    else:
        backward = (
            again + (keys + values) + of_states + (3 * state + 2 * keys + values) + (5 * keys + 2 * values + 2 * scores)
        )
    rstd, sums, chunk = ((B, T, H_), F), (tensors["g"][0], F), ((B, T, HV, BT), H)
    saved = _bytes(*[tensors["q"], rstd] * 2, sums, *[chunk] * (2 if channels else 1))
    name = "fla.ops.kda.chunk_kda" if channels else "fla.ops.gated_delta_rule.chunk_gated_delta_rule"
    return name, tensors, {"use_qk_l2norm_in_kernel": True}, forward, backward, saved, None


SHIPPED = {
    "conv": _conv,
    "scan": _scan,
    "inner": _inner,
    "dual": _dual,
    "gated dual": lambda: _dual(z=True),
    "split": _split,
    "gated delta rule": lambda: _delta(False),
    "kimi delta": lambda: _delta(True),
}


@pytest.mark.parametrize("kind", SHIPPED)
def test_a_shipped_stand_in_costs_and_saves_what_its_kernels_do(kind):
    name, tensors, options, forward, backward, saved, moved = SHIPPED[kind]()
    trace = trace_module(Call(name, tensors, options), (torch.zeros(1),), options=Options(dtype=None))
    assert f"stand-ins {name}" in trace["recorded_with"]
    of_call = [[e for e in _operators(trace, passes) if e[2] == 0] for passes in ("forwards", "backwards")]
    assert [sum(e[4] for e in events) for events in of_call] == [forward, backward]
    events = trace["forwards"][0]["events"]
    assert sum(e[2] for e in events if e[0] == "+" and e[3] == "saved") == saved
    if moved is not None:
        assert sum(e[5] + e[6] for e in of_call[0]) == moved
    graded = {e[1] for e in trace["backwards"][0]["events"] if e[0] == "param_grad"}
    assert graded == set(range(len(trace["parameters"])))
    assert not {"mamba_ssm", "causal_conv1d", "fla"} & sys.modules.keys(), "libraries that are not here are gone again"


def test_every_shipped_stand_in_is_tried():
    assert {make()[0] for make in SHIPPED.values()} == set(stand_ins.SHIPPED)


# ---- hybrids of transformers ----

_BASE = {**SMALL["llama"], "num_key_value_heads": 4, "num_attention_heads": 4, "head_dim": 16, "pad_token_id": 0}
_MAMBA2 = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 32}
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}
_KIMI = {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "kda_layers": [1], "full_attn_layers": [2]}
_LATENT = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "num_experts_per_token": 2,
}
_HEADS = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 32,
    "mamba_expand": 2,
}
_ZAMBA2 = {
    "n_mamba_heads": 8, "mamba_headdim": 16, "mamba_d_state": 16, "mamba_ngroups": 1,
    "layers_block_type": ["mamba", "hybrid"],
}
_SCAN = {"causal_conv1d.causal_conv1d_fwd", "mamba_ssm.selective_scan_fwd"}
_CHUNKS = {"causal_conv1d.causal_conv1d_fwd", "mamba_ssm.chunk_scan_fwd"}
# architecture -> config, kernels
HYBRIDS = {
    "FalconMambaForCausalLM": ({"model_type": "falcon_mamba", "state_size": 8}, _SCAN),
    "JambaForCausalLM": (
        {"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 4},
        _SCAN,
    ),
    "Mamba2ForCausalLM": (
        {"model_type": "mamba2", "num_heads": 8, "state_size": 16, "n_groups": 2, "chunk_size": 32},
        _CHUNKS,
    ),
    "BambaForCausalLM": ({"model_type": "bamba", **_HEADS, "attn_layer_indices": [1]}, _CHUNKS),
    "Zamba2ForCausalLM": ({"model_type": "zamba2", "chunk_size": 32, **_ZAMBA2}, _CHUNKS),
    "FalconH1ForCausalLM": ({"model_type": "falcon_h1", **_HEADS, "mamba_d_ssm": 128}, _CHUNKS),
    "GraniteMoeHybridForCausalLM": (
        {
            "model_type": "granitemoehybrid", **_HEADS, "layer_types": ["mamba", "attention"], "num_local_experts": 0,
            "shared_intermediate_size": 64,
        },
        _CHUNKS,
    ),
    "OlmoHybridForCausalLM": (
        {"model_type": "olmo_hybrid", "layer_types": ["linear_attention", "full_attention"], **_DELTA},
        {"causal_conv1d.causal_conv1d_fwd", "fla.chunk_gated_delta_rule_fwd_h"},
    ),
    "MambaForCausalLM": (
        {"model_type": "mamba", "state_size": 8},
        {"causal_conv1d.causal_conv1d_fwd", "mamba_ssm.selective_scan_fwd"},
    ),
    "NemotronHForCausalLM": (
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M*-M", **_MAMBA2},
        {"causal_conv1d.causal_conv1d_fwd", "mamba_ssm.chunk_scan_fwd"},
    ),
    "Lfm2ForCausalLM": (
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        {"causal_conv1d.causal_conv1d_fwd"},
    ),
    "Qwen3NextForCausalLM": (
        {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"], **_EXPERTS, **_DELTA},
        {"causal_conv1d.causal_conv1d_fwd", "fla.chunk_gated_delta_rule_fwd_h"},
    ),
    "KimiLinearForCausalLM": (
        {"model_type": "kimi_linear", "linear_attn_config": _KIMI, **_EXPERTS, **_LATENT},
        {"causal_conv1d.causal_conv1d_fwd", "fla.chunk_kda_fwd_inter_solve_fused"},
    ),
}


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_hybrids_run_the_kernels_of_their_libraries(architecture, tmp_path, capsys):
    config, kernels = HYBRIDS[architecture]
    path = _config(tmp_path, {**_BASE, **config, "architectures": [architecture]})
    trace = _trace(tmp_path, path, "--seq", "300")
    assert kernels <= {e[1] for e in _operators(trace, "forwards")}
    assert len(_operators(trace)) < 1500, "no loop over time"
    graded = {e[1] for e in trace["backwards"][0]["events"] if e[0] == "param_grad"}
    # A router's bias that balances the experts is no gradient's.
    assert all("e_score_correction_bias" in p["fqn"] for i, p in enumerate(trace["parameters"]) if i not in graded)
    assert "falling back" not in capsys.readouterr().err
    modeling = sys.modules[f"transformers.models.{config['model_type']}.modeling_{config['model_type']}"]
    bound = [stand_ins._bound(wrapper) for wrapper in stand_ins._wrappers() if wrapper.__module__ == modeling.__name__]
    assert bound and all(b["implementation"] is b["torch_function"] for b in bound), "as they were"
    assert _trace(tmp_path, path, "--seq", "300") == trace, "of a module that was imported before"


def test_a_shipped_stand_in_can_be_taken_away(tmp_path):
    config = {**_BASE, **HYBRIDS["Lfm2ForCausalLM"][0], "architectures": ["Lfm2ForCausalLM"]}
    trace = _trace(
        tmp_path, _config(tmp_path, config), "--seq", "16", "--stand-in", "causal_conv1d.causal_conv1d_fn=none"
    )
    names = {e[1] for e in _operators(trace)}
    assert "aten.convolution" in names and not any(name.startswith("causal_conv1d") for name in names)


@pytest.mark.parametrize("update", [False, True])
def test_a_callable_imports_what_it_imports_from_an_installed_library(update, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    called = "causal_conv1d_update(x, self.weight)" if update else "causal_conv1d_fn(x, self.weight)"
    (tmp_path / f"convolved_{update}.py").write_text(f"""
import torch
from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from mamba_ssm.ops.triton.selective_state_update import selective_state_update
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from torch import nn

class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 4))

    def forward(self, x):
        return {called}

def build():
    return Convolved(), (torch.zeros(2, 8, 16),)
""")
    code = cli.main([f"convolved_{update}:build", "-q", "-o", "t.json"])
    error = capsys.readouterr().err
    assert code == (3 if update else 0), error
    assert (
        not update
        or "the model calls causal_conv1d.causal_conv1d_update, which is for generation and has no stand-in" in error
    )
    assert not {"mamba_ssm", "causal_conv1d", "fla"} & sys.modules.keys()


# ---- a user's own ----

_MODEL = """
import torch
from torch import nn
from {library} import fused

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 4))
    def forward(self, x):
        y, state = fused(x @ self.weight, scale=2.0)
        return y

def build():
    return Block(), (torch.empty(5, 8),)
"""
_STAND_IN = """
from shardplan.tracer.stand_ins import Kernel

def fused(x, scale):
    y, state, scratch = x.new_empty(x.shape), x.new_empty(x.shape[0], 3), x.new_empty(100)
    kept = x.new_empty(7)
    return Kernel((y, state), saved=(x, kept), temporaries=(scratch,), flops=11 * x.numel(), bytes_read=1000, \
backward_flops=5, backward_bytes_written=77)

a_number = 3

def unfused(x, scale):
    return x * scale, None
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "own_kernels.py").write_text(
        "def fused(x, scale):\n    raise RuntimeError(f'a device reads {x.data_ptr()}')\n"
    )
    (tmp_path / "own_model.py").write_text(_MODEL.format(library="own_kernels"))
    (tmp_path / "model_of_absent.py").write_text(_MODEL.format(library="no_library_of_this_name.ops"))
    (tmp_path / "stand_ins_of_mine.py").write_text(_STAND_IN)
    yield tmp_path
    for name in ("own_kernels", "own_model", "model_of_absent"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "model, name", [("own_model", "own_kernels.fused"), ("model_of_absent", "no_library_of_this_name.ops.fused")]
)
def test_a_stand_in_of_the_users_says_what_a_kernel_costs(model, name, own):
    trace = _trace(own, f"{model}:build", "--stand-in", f"{name}=stand_ins_of_mine.py:fused")
    (forward,) = [e for e in _operators(trace, "forwards") if "fused" in e[1]]
    (backward,) = [e for e in _operators(trace, "backwards") if "fused" in e[1]]
    kernel = name.replace(".ops", "_ops")
    assert forward[1:7] == [kernel, 0, "float32", 11 * 20, 1000, 4 * (20 + 15 + 7)]
    # The gradient of y (a sum's: one number, expanded), x and what is kept. Autograd makes zeros for the state's.
    read = 4 * (1 + 20 + 7)
    assert backward[1] == f"{kernel}_backward" and backward[4:7] == [5, read + 4 * 15, 77]
    events = trace["forwards"][0]["events"]
    roles = {e[2]: e[3] for e in events if e[0] == "+"}
    assert roles[4 * 7] == "saved" and roles[4 * 100] == "forward_temp"
    place = events.index(forward)
    scratch = next(e[1] for e in events if e[0] == "+" and e[2] == 400)
    assert events.index(["-", scratch]) > place, "a temporary is there while the kernel runs"
    assert f"stand-ins {name}" in trace["recorded_with"]


def test_a_stand_in_may_be_plain_torch(own):
    trace = _trace(own, "own_model:build", "--stand-in", "own_kernels.fused=stand_ins_of_mine.py:unfused")
    assert "aten.mul" in {e[1] for e in _operators(trace, "forwards")} and trace["backwards"]


@pytest.mark.parametrize(
    "argument, code, message",
    [
        ("own_kernels.fused", 2, "expected package.module.function=FILE:callable"),
        ("fused=stand_ins_of_mine.py:fused", 2, "expected package.module.function"),
        ("own_kernels.fused=none", 2, "nothing stands in for own_kernels.fused"),
        ("own_..fused=stand_ins_of_mine.py:fused", 2, "expected package.module.function"),
        ("own_kernels.fused=nowhere.py:fused", 3, "nowhere.py: no such file"),
        ("own_kernels.fused=.:fused", 3, ".: a folder; expected a Python file"),
        ("own_kernels.fused=wrong.py:fused", 3, "wrong.py failed: SyntaxError: "),
        ("own_kernels.fused=exits.py:fused", 3, "exits.py failed: SystemExit: 7"),
        ("own_kernels.fused=stand_ins_of_mine.py:missing", 3, "has no callable missing; it has fused, unfused"),
        ("own_kernels.fused=stand_ins_of_mine.py:a_number", 3, "has no callable a_number; it has fused, unfused"),
        ("own_kernels.other=stand_ins_of_mine.py:fused", 3, "there is no such function"),
        ("math.sqrt=stand_ins_of_mine.py:fused", 2, "nothing calls this function"),
    ],
)
def test_stand_ins_that_cannot_be_say_why(argument, code, message, own, capsys):
    (own / "wrong.py").write_text("def fused(:\n")
    (own / "exits.py").write_text("raise SystemExit(7)\n")
    given = [*(["own_kernels.fused=stand_ins_of_mine.py:unfused"] if argument.startswith("math") else []), argument]
    options = [word for text in given for word in ("--stand-in", text)]
    assert cli.main(["own_model:build", "-q", "-o", "t.json", *options]) == code
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1, error
    assert not (own / "t.json").exists()


def test_two_stand_ins_of_one_function_are_a_usage_error(own, capsys):
    argument = "own_kernels.fused=stand_ins_of_mine.py:fused"
    assert cli.main(["own_model:build", "-q", "-o", "t.json", "--stand-in", argument, "--stand-in", argument]) == 2
    assert "own_kernels.fused has one already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "returned, message",
    [
        ("None", "returned None; expected a Kernel, or tensors as the function returns them"),
        ("(1, 'state')", "returned a value of type tuple without a tensor; expected a Kernel"),
        (
            "Kernel(None)",
            "returned a Kernel with outputs without a tensor; "
            "expected tensors made of an argument, as x.new_empty(...)",
        ),
        (
            "Kernel(torch.empty(3, device='cpu'))",
            "returned a Kernel with outputs with a tensor on cpu; expected them on the arguments' device",
        ),
        ("Kernel(x.new_empty(3), flops=1.5)", "returned a Kernel with flops = 1.5; expected an integer of 0 or more"),
        ("Kernel(x.new_empty(3), flops=None)", "returned a Kernel with flops = None; expected an integer of 0 or more"),
        (
            "Kernel(x.new_empty(3), backward_bytes_read=-1)",
            "returned a Kernel with backward_bytes_read = -1; expected an integer of 0 or more",
        ),
        (
            "Kernel(x.new_empty(3), saved=x)",
            "returned a Kernel with saved of type Tensor; expected a list or tuple of tensors",
        ),
        (
            "Kernel(x.new_empty(3), saved=(1,))",
            "returned a Kernel with saved with an element of type int; expected tensors",
        ),
        (
            "Kernel(x.new_empty(3), name='matmul')",
            "returned a Kernel with name = 'matmul'; expected \"library::kernel\"",
        ),
        ("Kernel(x.new_empty(3), name='aten::mm')", 'launches a kernel called "aten::mm", which torch refuses'),
        (
            "Kernel(x.new_empty(3), dtype='bfloat16')",
            "returned a Kernel with dtype = 'bfloat16'; expected a torch.dtype",
        ),
        ("x.nothing", "failed: AttributeError: "),
        ("launch('matmul', [x], [x])", 'launches a kernel called "matmul"; expected "library::kernel"'),
    ],
)
def test_what_a_stand_in_returns_is_checked(returned, message, own, capsys):
    text = (
        "import torch\nfrom shardplan.tracer.stand_ins import Kernel, launch\n\ndef fused(x, scale):\n    return "
        f"{returned}\n"
    )
    (own / "stand_ins_of_mine.py").write_text(text)
    stand_in = "own_kernels.fused=stand_ins_of_mine.py:fused"
    assert cli.main(["own_model:build", "-q", "-o", "t.json", "--stand-in", stand_in]) == 3
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1, error
    assert "stand-in" in error and not (own / "t.json").exists()


def test_a_stand_ins_file_may_hold_any_code(own):
    """A dataclass, and the original itself, which is still that function there."""
    (own / "own_kernels.py").write_text("def fused(x, scale):\n    return x * scale, None\n")
    (own / "stand_ins_of_mine.py").write_text("""
from __future__ import annotations
from dataclasses import dataclass
from own_kernels import fused as original

@dataclass
class Scaled:
    by: float = 3.0

def fused(x, scale):
    return original(x, scale * Scaled().by)
""")
    trace = _trace(own, "own_model:build", "--stand-in", "own_kernels.fused=stand_ins_of_mine.py:fused")
    assert [e[1] for e in _operators(trace, "forwards")].count("aten.mul") == 1


def test_a_stand_in_of_other_parameters_says_how_it_is_called(own, capsys):
    (own / "stand_ins_of_mine.py").write_text("def fused(x, factor):\n    return x, None\n")
    assert (
        cli.main(
            ["own_model:build", "-q", "-o", "t.json", "--stand-in", "own_kernels.fused=stand_ins_of_mine.py:fused"]
        )
        == 3
    )
    error = capsys.readouterr().err
    assert "takes (x, factor); the model calls it with (Tensor, scale=)" in error and len(error.splitlines()) == 1, (
        error
    )


@pytest.mark.parametrize(
    "name, arithmetic",
    [
        ("None", ("own_kernels.fused", "float32")),
        ("'ours::fused_matmul', dtype=torch.bfloat16", ("ours.fused_matmul", "bfloat16")),
    ],
)
def test_a_kernels_name_and_dtype_may_be_said(name, arithmetic, own):
    text = (
        "import torch\nfrom shardplan.tracer.stand_ins import Kernel\n\ndef fused(x, scale):\n    return "
        "Kernel((x.new_empty(x.shape), None), flops=7, name="
        + name
        + ")\n"
    )
    (own / "stand_ins_of_mine.py").write_text(text)
    trace = _trace(own, "own_model:build", "--stand-in", "own_kernels.fused=stand_ins_of_mine.py:fused")
    kernels = [e for e in _operators(trace, "forwards") + _operators(trace, "backwards") if "fused" in e[1]]
    assert [(e[1], e[3], e[4]) for e in kernels] == [(*arithmetic, 7), (f"{arithmetic[0]}_backward", arithmetic[1], 14)]


# ---- of a method ----

_METHODS = """
import torch
from torch import nn

class Base(nn.Module):
    def scan(self, x):
        raise RuntimeError("loops over every step")

class Block(Base):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8))
    def forward(self, x):
        return self.{call}
    @staticmethod
    def scan_static(x, weight):
        raise RuntimeError("loops over every step")
    @classmethod
    def scan_class(cls, x, weight):
        raise RuntimeError("loops over every step")

def build():
    return Block(), (torch.empty(5, 8),)
"""


@pytest.mark.parametrize(
    "method, call, parameters",
    [
        ("Block.scan", "scan(x)", "module, x"),
        ("Base.scan", "scan(x)", "module, x"),
        ("Block.scan_static", "scan_static(x, self.weight)", "x, weight"),
        ("Block.scan_class", "scan_class(x, self.weight)", "cls, x, weight"),
    ],
)
def test_a_method_has_a_stand_in(method, call, parameters, tmp_path, monkeypatch):
    """The object comes first. Its parameters are read, and get a gradient, as those among the arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    model = f"model_of_{method.replace('.', '_')}"
    (tmp_path / f"{model}.py").write_text(_METHODS.format(call=call))
    (tmp_path / "mine.py").write_text(
        f"from shardplan.tracer.stand_ins import Kernel\n\ndef scan({parameters}):\n    return "
        "Kernel(x.new_empty(x.shape), saved=(x,), flops=3)\n"
    )
    trace = _trace(tmp_path, f"{model}:build", "--stand-in", f"{model}.{method}=mine.py:scan")
    (forward,), (backward,) = (
        [e for e in _operators(trace, passes) if "scan" in e[1]] for passes in ("forwards", "backwards")
    )
    assert (forward[1], backward[1]) == (kernel := f"{model}_{method}", f"{kernel}_backward")
    assert forward[5] == 4 * (5 * 8 + 8) and backward[6] == 4 * 8, (
        "the weight is read, and gets a gradient; the input needs none"
    )
    assert {e[1] for e in trace["backwards"][0]["events"] if e[0] == "param_grad"} == {0}
    with pytest.raises(RuntimeError, match="loops over every step"):
        block = sys.modules[model].Block()
        eval(f"block.{call}", {"block": block, "x": None, "self": block})
    del sys.modules[model]
