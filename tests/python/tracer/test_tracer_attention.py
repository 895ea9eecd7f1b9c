# SPDX-License-Identifier: Apache-2.0
"""Which attention kernel a traced model takes."""

import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(ROOT / "tools" / "python"))

from shardplan.tracer import attention, session  # noqa: E402
from shardplan.tracer.session import Options, trace_module  # noqa: E402


def _query(heads=8, dtype=torch.bfloat16, head_dim=64, seq=16):
    return torch.empty(2, heads, seq, head_dim, dtype=dtype)


@pytest.mark.parametrize(
    "order, q, k, mask, causal, gqa, expected",
    [
        ("auto", _query(), _query(), None, True, False, "flash"),
        ("auto", _query(), _query(2), None, True, True, "flash"),
        ("auto", _query(), _query(2), None, True, False, "math"),
        ("auto", _query(head_dim=256), _query(head_dim=256), None, False, False, "flash"),
        ("auto", _query(head_dim=264), _query(head_dim=264), None, False, False, "efficient"),
        ("auto", _query(head_dim=20), _query(head_dim=20), None, False, False, "flash"),
        ("auto", _query(), _query(), torch.empty(16, 16), False, False, "efficient"),
        ("auto", _query(), _query(2), torch.empty(16, 16), False, True, "math"),
        ("auto", _query(dtype=torch.float32), _query(dtype=torch.float32), None, True, False, "efficient"),
        (
            "auto",
            _query(dtype=torch.float32, head_dim=18),
            _query(dtype=torch.float32, head_dim=18),
            None,
            True,
            False,
            "math",
        ),
        ("auto", _query(dtype=torch.float64), _query(dtype=torch.float64), None, True, False, "math"),
        ("auto", _query(), _query(seq=8), None, True, False, "efficient"),
        ("auto", _query(), _query(seq=8), None, False, False, "flash"),
        ("cudnn", _query(), _query(2), None, True, True, "cudnn"),
        ("cudnn", _query(head_dim=192), _query(head_dim=192), None, True, False, "flash"),
        ("efficient", _query(), _query(), None, True, False, "efficient"),
        ("math", _query(), _query(), None, True, False, "math"),
    ],
)
def test_attention_takes_the_kernel_of_a_device(order, q, k, mask, causal, gqa, expected):
    assert attention.choose(order, q, k, k, mask, 0.0, causal, gqa) == expected


@pytest.mark.parametrize("head_dim, mask", [(20, False), (16, True)])
def test_padded_heads_and_masks_go_forward_and_backward(head_dim, mask):
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(head_dim, head_dim)

        def forward(self, x):
            x = self.project(x)
            allowed = torch.ones(x.size(2), x.size(2), dtype=torch.bool, device=x.device) if mask else None
            out = F.scaled_dot_product_attention(x, x, x, attn_mask=allowed)
            assert out.shape == x.shape
            return out

    trace = trace_module(Attend(), (torch.zeros(2, 4, 18, head_dim),), options=Options(dtype="bfloat16"))
    names = {e[1] for p in (*trace["forwards"], *trace["backwards"]) for e in p["events"] if e[0] == "op"}
    kernel = "efficient" if mask else "flash"
    assert {
        f"aten._scaled_dot_product_{kernel}_attention",
        f"aten._scaled_dot_product_{kernel}_attention_backward",
    } <= names


def _cpu_cases():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
        for heads, kv_heads, seq, kv_seq, head_dim, v_dim in (
            (4, 4, 64, 64, 8, 8),
            (4, 2, 16, 16, 8, 8),
            (3, 2, 7, 7, 5, 5),
            (4, 4, 8, 9, 16, 16),
            (2, 2, 8, 8, 8, 9),
        ):
            q, k, v = (
                torch.zeros(2, h, s, d, dtype=dtype)
                for h, s, d in ((heads, seq, head_dim), (kv_heads, kv_seq, head_dim), (kv_heads, kv_seq, v_dim))
            )
            for dropout_p in (0.0, 0.1):
                yield q, k, v, None, dropout_p, True
                for mask in (
                    None, torch.zeros(seq, kv_seq, dtype=dtype), torch.zeros(2, 1, seq, kv_seq, dtype=torch.bool),
                    torch.zeros(1, seq, kv_seq, dtype=dtype),
                ):
                    yield q, k, v, mask, dropout_p, False
            if dtype.is_floating_point:
                yield q, k, v, torch.zeros(seq, kv_seq, dtype=dtype, requires_grad=True), 0.0, False
            yield q.transpose(2, 3).contiguous().transpose(2, 3), k, v, None, 0.0, False


def test_cpu_attention_is_what_torch_chooses_here():
    """Against torch's own choice among CPU kernels: 0 is the unfused one, 1 flash."""
    flash = 0
    for q, k, v, mask, dropout_p, causal in _cpu_cases():
        gqa = q.size(1) != k.size(1)
        try:
            chosen = torch._fused_sdp_choice(q, k, v, mask, dropout_p, causal, enable_gqa=gqa)
        except RuntimeError:
            continue  # torch has none for this
        mine = attention.choose("cpu", q, k, v, mask, dropout_p, causal, gqa)
        assert (mine == "cpu") == (chosen == 1), (
            q.shape, k.shape, v.shape, q.dtype, mask is not None and mask.shape, dropout_p,
        )
        flash += chosen == 1
    assert flash > 40


class _Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "scaled_dot" in func.__name__:
            self.names.append((func.__name__, [(tuple(t.shape), t.stride()) for t in result]))
        return result


@pytest.mark.parametrize(
    "shape, kv_heads, mask",
    [((2, 4, 16, 8), 4, False), ((2, 4, 16, 8), 2, False), ((2, 4, 16, 8), 4, True), ((4, 16, 8), 4, False)],
)
def test_cpu_attention_is_the_operator_that_a_cpu_runs(shape, kv_heads, mask):
    """Forward and backward by name, sizes and strides, on real CPU tensors and traced."""

    def attend(device):
        q = torch.zeros(shape, device=device, requires_grad=True)
        kv = torch.zeros((*shape[:-3], kv_heads, *shape[-2:]), device=device, requires_grad=True)
        allowed = torch.ones(shape[-2], shape[-2], dtype=torch.bool, device=device) if mask else None
        F.scaled_dot_product_attention(q, kv, kv, allowed, enable_gqa=kv_heads != shape[-3]).sum().backward()

    with _Operators() as real:
        attend("cpu")
    with session._recording(Options(sdpa="cpu")), _Operators() as traced:
        attend("cuda")
    assert len(real.names) == 2
    assert traced.names == real.names
