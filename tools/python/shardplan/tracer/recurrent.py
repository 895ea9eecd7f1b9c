# SPDX-License-Identifier: Apache-2.0
"""nn.LSTM, nn.GRU and nn.RNN as a CUDA device runs them: one cuDNN kernel a call.

The path to it asks the driver for the device before it calls the kernel. Here the kernel is called by its name, with
the arguments of that path (reference: aten/native/cudnn/RNN.cpp of torch 2.11). Shapes of its backward's results are
added, since torch has no rule for them. The size of the reserve, which cuDNN keeps for the backward, only cuDNN knows:
see RESERVED.

Registered at the AutogradCUDA key, as in attention.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import _meta_registrations as meta

aten = torch.ops.aten

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_GATES = (1, 1, 4, 3)  # by mode
# Values per step, sample and hidden unit that the backward of a layer needs beside its input. They are the gates, the
# cell's own (an LSTM's state, a GRU's recurrent part of the candidate) and the layer's output. cuDNN keeps at least
# these.
RESERVED = (1, 1, 6, 5)


def _reserve_bytes(mode, hidden, proj, layers, directions, steps, batch, itemsize) -> int:
    return RESERVED[mode] * hidden * layers * directions * steps * batch * itemsize


def _forward(
    input, weight, weight_stride0, weight_buf, hx, cx, mode, hidden_size, proj_size, num_layers, batch_first, dropout,
    train, bidirectional, batch_sizes, dropout_state,
):  # fmt: skip
    output, hy, cy, _, _ = meta._cudnn_rnn(
        input, weight, weight_stride0, weight_buf, hx, cx, mode, hidden_size, proj_size, num_layers, batch_first,
        dropout, train, bidirectional, batch_sizes, dropout_state,
    )
    directions = 2 if bidirectional else 1
    steps, batch = input.shape[:2] if not batch_first else (input.shape[1], input.shape[0])
    kept = 0
    if train:
        kept = _reserve_bytes(mode, hidden_size, proj_size, num_layers, directions, steps, batch, input.element_size())
    if weight_buf is None:  # the weights are no parts of one buffer: they are copied into one
        weight_buf = input.new_empty(sum(w.numel() for w in weight))
    return output, hy, cy, input.new_empty(kept, dtype=torch.uint8), weight_buf


def _backward(input, weight, weight_stride0, weight_buf, hx, cx, output, *rest):
    mask = rest[-1]
    grad_cx = torch.empty_like(cx) if cx is not None and mask[2] else torch.empty(0, device=input.device)
    return (
        torch.empty_like(input) if mask[0] else torch.empty(0, device=input.device),
        torch.empty_like(hx) if mask[1] else torch.empty(0, device=input.device),
        grad_cx,
        [torch.empty_like(w) for w in weight] if mask[3] else [],
    )


def _gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def _gru_cell_backward(grad_hy, workspace, has_bias):
    batch, hidden = grad_hy.shape[0], workspace.shape[1] // 5
    gates = (workspace.new_empty(batch, 3 * hidden), workspace.new_empty(batch, 3 * hidden))
    bias = workspace.new_empty(3 * hidden if has_bias else 0)
    return (*gates, workspace.new_empty(batch, hidden), bias, torch.empty_like(bias))


def _run(kind, input, hx, cx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
    hidden = (cx if cx is not None else hx).shape[2]
    proj = hx.shape[2] if hx.shape[2] != hidden else 0
    stride = (4 if has_biases else 2) + (1 if proj else 0)
    state = torch.empty(1, dtype=torch.uint8, device=input.device) if dropout > 0 and train else None
    output, hy, cy, _, _ = aten._cudnn_rnn(
        input, list(params), stride, None, hx, cx, _MODES[kind], hidden, proj, num_layers, batch_first, dropout, train,
        bidirectional, [], state,
    )  # fmt: skip
    return output, hy, cy


def flops(operator: str, args: tuple) -> int | None:
    """FLOPs of _cudnn_rnn and its backward: the products with the weights, twice as many in the backward. None: another
    operator."""
    if operator not in ("_cudnn_rnn", "_cudnn_rnn_backward"):
        return None
    input, weight = args[0], args[1]
    rows = math.prod(input.shape[:-1])
    forward = sum(2 * rows * w.numel() for w in weight if w.dim() == 2)
    return forward if operator == "_cudnn_rnn" else 2 * forward


@contextlib.contextmanager
def device_recurrent() -> Iterator[None]:
    """Inside, recurrent layers on CUDA tensors take the kernel that a device takes."""

    def lstm(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
        return _run(
            "lstm", input, hx[0], hx[1], params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )

    def plain(kind):
        def run(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
            return _run(
                kind, input, hx, None, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
            )[:2]

        return run

    library = torch.library.Library("aten", "IMPL")
    library.impl("lstm.input", lstm, "AutogradCUDA")
    for kind in ("gru", "rnn_tanh", "rnn_relu"):
        library.impl(f"{kind}.input", plain(kind), "AutogradCUDA")
    library.impl("_cudnn_rnn", _forward, "Meta", allow_override=True)
    library.impl("_cudnn_rnn_backward", _backward, "Meta")
    library.impl("_thnn_fused_gru_cell", _gru_cell, "Meta")
    library.impl("_thnn_fused_gru_cell_backward", _gru_cell_backward, "Meta")
    try:
        yield
    finally:
        library._destroy()
