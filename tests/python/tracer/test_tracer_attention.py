"""Which attention kernel a traced model takes."""

import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from torch import nn

sys.path.insert(0, str(ROOT / "tools" / "python"))

from shardplan.tracer import attention  # noqa: E402
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
