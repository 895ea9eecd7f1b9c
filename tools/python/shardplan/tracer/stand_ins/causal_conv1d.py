# SPDX-License-Identifier: Apache-2.0
"""causal_conv1d 1.6.1: a depthwise convolution over the past, and its SiLU, in one kernel
(causal_conv1d/causal_conv1d_interface.py, cpp_functions.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from shardplan.tracer.stand_ins.launch import launch


def forward_kernel(x, weight, bias, seq_idx, initial_states, final_states, silu: bool) -> Tensor:
    out = torch.empty_like(x)
    reads = [x, weight, bias, seq_idx, initial_states]
    launch(
        "causal_conv1d::causal_conv1d_fwd", reads, [out, final_states], 2 * x.numel() * weight.shape[-1], torch.float32
    )
    return out


def backward_kernel(x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx, silu: bool):
    """The gradients of x, weight, bias and initial_states. SiLU's needs the convolution once more."""
    dx = torch.empty_like(x) if dx is None else dx
    dweight = torch.zeros_like(weight, dtype=torch.float32)
    dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    dinitial = None if initial_states is None else torch.empty_like(initial_states)
    products = 3 if silu else 2
    launch(
        "causal_conv1d::causal_conv1d_bwd",
        [x, weight, bias, dout, seq_idx, initial_states, dfinal_states],
        [dx, dweight, dbias, dinitial],
        products * 2 * x.numel() * weight.shape[-1],
        torch.float32,
    )
    return dx, dweight.to(weight.dtype), None if bias is None else dbias.to(bias.dtype), dinitial


def dense(x: Tensor) -> Tensor:
    """The kernel reads rows or columns without gaps."""
    return x if 1 in x.stride()[1:] else x.contiguous()


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, seq_idx, initial_states, return_final_states, activation):
        x = dense(x)
        final = (
            x.new_empty(x.shape[0], weight.shape[1] - 1, x.shape[1]).transpose(1, 2) if return_final_states else None
        )
        ctx.silu = activation in ("silu", "swish")
        out = forward_kernel(x, weight, bias, seq_idx, initial_states, final, ctx.silu)
        ctx.save_for_backward(x, weight, bias, seq_idx, initial_states)
        return (out, final) if return_final_states else out

    @staticmethod
    def backward(ctx, dout, *dfinal):
        x, weight, bias, seq_idx, initial_states = ctx.saved_tensors
        given = backward_kernel(
            x, weight, bias, dense(dout), seq_idx, initial_states, (*dfinal, None)[0], None, ctx.silu
        )
        dx, dweight, dbias, dinitial = given
        return dx, dweight, dbias, None, dinitial, None, None


def causal_conv1d_fn(
    x,
    weight,
    bias=None,
    seq_idx=None,
    initial_states=None,
    return_final_states=False,
    final_states_out=None,
    activation=None,
):
    """x: (batch, channels, length), weight: (channels, width)."""
    return _Conv.apply(x, weight, bias, seq_idx, initial_states, return_final_states, activation)
