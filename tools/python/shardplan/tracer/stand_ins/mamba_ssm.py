# SPDX-License-Identifier: Apache-2.0
"""mamba_ssm 2.3.2: the selective scan of Mamba (ops/selective_scan_interface.py,
csrc/selective_scan/selective_scan.cpp) and the state space dual of Mamba 2 (ops/triton/ssd_combined.py and what it
calls), kernel by kernel.

Letters are the library's: b batch, l length, h heads, p a head's width, g groups, n state, c chunks, q a chunk's
length; d channels.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from shardplan.tracer.stand_ins import causal_conv1d
from shardplan.tracer.stand_ins.launch import launch

_SCAN_CHUNK = 2048  # of the selective scan
# FLOPs per step, channel and state of the kernels as they are written
# (csrc/selective_scan/selective_scan_{fwd,bwd}_kernel.cuh). A scan's operator has 3. cub's block scan, and the reverse
# one, apply it twice to each item: to the sum of a thread's items, then to each behind what comes before the thread.
# Work that is done once for all states (softplus, skip, gate) is left out.
_SCAN = 2 * 3
_FORWARD = 2 + 1 + _SCAN + 2  # decay (product, exponential), input, scan, output
# Terms: the forward again; both scans; gradients of input and time step, of A, of B and C; sums in memory.
_BACKWARD = (2 + 2 + 1) + 2 * _SCAN + (1 + 2 + 1 + 5) + 3 + (2 + 1) + 2
_MULTIPROCESSORS = 132  # of an H100: some reductions are split by them
_PART_OF_STATE, _ROWS_OF_CHUNK = 64, 32  # what one block of a backward reduces at least


def _rows_dense(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _scan_forward(u, delta, A, B, C, D, z, delta_bias) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output, the states at the chunks' ends, and the gated output."""
    gated = None if z is None else torch.empty_like(z)
    out = torch.empty_like(delta)
    chunks = math.ceil(u.shape[2] / _SCAN_CHUNK)
    states = torch.empty(u.shape[0], u.shape[1], chunks, 2 * A.shape[1], dtype=A.dtype, device=u.device)
    launch(
        "mamba_ssm::selective_scan_fwd",
        [u, delta, A, B, C, D, z, delta_bias],
        [out, states, gated],
        _FORWARD * u.numel() * A.shape[1],
        torch.float32,
    )
    return out, states, gated


def _scan_backward(u, delta, A, B, C, D, z, delta_bias, dout, states, out, dz, again: bool):
    """The gradients, and the gated output again. The states are computed once more."""
    if z is not None and dz is None:
        dz = torch.empty_like(z)
    gated = torch.empty_like(out) if again else None
    du, ddelta, dA = torch.empty_like(u), torch.empty_like(delta), torch.zeros_like(A)
    dB, dC = (torch.zeros_like(t, dtype=torch.float32) if t.dim() > 2 else torch.zeros_like(t) for t in (B, C))
    dD, dbias = (None if t is None else torch.zeros_like(t) for t in (D, delta_bias))
    launch(
        "mamba_ssm::selective_scan_bwd",
        [u, delta, A, B, C, D, z, delta_bias, dout, states, out],
        [du, ddelta, dA, dB, dC, dD, dbias, dz, gated],
        _BACKWARD * u.numel() * A.shape[1],
        torch.float32,
    )
    return du, ddelta, dA, dB.to(B.dtype), dC.to(C.dtype), dD, dz, dbias, gated


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, delta, A, B, C, D, z, delta_bias, return_last_state):
        u, delta, B, C, z = map(_rows_dense, (u, delta, B, C, z))
        D = None if D is None else D.contiguous()
        ctx.squeezed = B.dim() == 3, C.dim() == 3
        B, C = (t.unsqueeze(1) if t.dim() == 3 else t for t in (B, C))
        out, states, gated = _scan_forward(u, delta, A, B, C, D, z, delta_bias)
        ctx.save_for_backward(u, delta, A, B, C, D, z, delta_bias, states, None if z is None else out)
        returned = out if z is None else gated
        return (returned, states[:, :, -1, 1::2]) if return_last_state else returned

    @staticmethod
    def backward(ctx, dout, *_):
        u, delta, A, B, C, D, z, delta_bias, states, out = ctx.saved_tensors
        given = _scan_backward(u, delta, A, B, C, D, z, delta_bias, _rows_dense(dout), states, out, None, False)
        du, ddelta, dA, dB, dC, dD, dz, dbias, _ = given
        dB, dC = (t.squeeze(1) if squeezed else t for t, squeezed in zip((dB, dC), ctx.squeezed))
        return du, ddelta, dA, dB, dC, dD, dz, dbias, None


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
):
    """u, delta, z: (b, d, l); A: (d, n); B, C: (b, n, l), (b, g, n, l) or (d, n)."""
    return _SelectiveScan.apply(u, delta, A, B, C, D, z, delta_bias, return_last_state)


def _rows(tensor: Tensor) -> Tensor:
    """(b, d, l) as (b l, d), a copy where the layout needs one."""
    return tensor.transpose(1, 2).reshape(-1, tensor.shape[1])


def _normed(tensor: Tensor, weight: Tensor | None) -> Tensor:
    """The root mean square norm of the channels of (b, ..., d, l), in rows and back."""
    if weight is None:
        return tensor
    rows = tensor.flatten(1, -2).transpose(1, 2).contiguous()
    normed = torch.empty_like(rows)
    rstd = rows.new_empty(rows.shape[:-1], dtype=torch.float32)
    launch("mamba_ssm::layer_norm_fwd", [rows, weight], [normed, rstd])
    return normed.transpose(1, 2).contiguous().view(tensor.shape)


class _MambaInner(torch.autograd.Function):
    """A whole Mamba mixer behind its first projection. The convolution and the time steps are computed again in the
    backward."""

    @staticmethod
    def forward(ctx, xz, conv_weight, conv_bias, x_proj, delta_proj, out_proj, out_bias, A, B, C, D, delta_bias, norms):
        xz = _rows_dense(xz)
        conv_weight = conv_weight.squeeze(1)
        x, z = xz.chunk(2, dim=1)
        convolved = causal_conv1d.forward_kernel(x, conv_weight, conv_bias, None, None, None, True)
        x_dbl = F.linear(_rows(convolved), x_proj)
        rank, n = delta_proj.shape[1], A.shape[-1]
        ctx.variable = B is None, C is None
        delta = _deltas(x_dbl, delta_proj, x)
        if B is None:
            B = _states_of(x_dbl[:, rank : rank + n], x)
        if C is None:
            C = _states_of(x_dbl[:, -n:], x)
        B, C, delta = (_normed(t, weight) for t, weight in zip((B, C, delta), norms))
        out, states, gated = _scan_forward(convolved, delta, A, B, C, D, z, delta_bias)
        convolved = delta = None
        ctx.norms = norms
        ctx.out_bias = out_bias is not None
        ctx.save_for_backward(
            xz, conv_weight, conv_bias, x_dbl, x_proj, delta_proj, out_proj, A, B, C, D, delta_bias, states, out
        )
        return F.linear(gated.transpose(1, 2), out_proj, out_bias)

    @staticmethod
    def backward(ctx, dout):
        xz, conv_weight, conv_bias, x_dbl, x_proj, delta_proj, out_proj, A, B, C, D, delta_bias, states, out = (
            ctx.saved_tensors
        )
        x, z = xz.chunk(2, dim=1)
        dout = _rows_dense(dout)
        rank, n, (batch, channels, length) = delta_proj.shape[1], A.shape[-1], x.shape
        convolved = causal_conv1d.forward_kernel(x, conv_weight, conv_bias, None, None, None, True)
        delta = _normed(_deltas(x_dbl, delta_proj, x), ctx.norms[2])
        B, C = (_normed(t, weight) for t, weight in zip((B, C), ctx.norms))
        dxz = torch.empty_like(xz)
        dx, dz = dxz.chunk(2, dim=1)
        dout = dout.reshape(-1, dout.shape[-1]).t()
        dy = (out_proj.t() @ dout).view(channels, batch, length).transpose(0, 1)
        given = _scan_backward(convolved, delta, A, B, C, D, z, delta_bias, dy, states, out, dz, True)
        dconvolved, ddelta, dA, dB, dC, dD, dz, ddelta_bias, gated = given
        dout_proj = dout @ _rows(gated)
        dout_bias = dout.sum(1) if ctx.out_bias else None
        dx_dbl = torch.empty_like(x_dbl)
        if ctx.variable[0]:
            dx_dbl[:, rank : rank + n] = _rows(dB.squeeze(1)).contiguous()
            dB = None
        if ctx.variable[1]:
            dx_dbl[:, -n:] = _rows(dC.squeeze(1)).contiguous()
            dC = None
        ddelta = ddelta.transpose(0, 1).reshape(channels, -1)
        ddelta_proj = ddelta @ x_dbl[:, :rank]
        dx_dbl[:, :rank] = ddelta.t() @ delta_proj
        dconvolved = dconvolved.transpose(0, 1).reshape(channels, -1)
        dx_proj = dx_dbl.t() @ _rows(convolved)
        torch.addmm(dconvolved, x_proj.t(), dx_dbl.t(), out=dconvolved)
        dconvolved = dconvolved.view(channels, batch, length).transpose(0, 1)
        given = causal_conv1d.backward_kernel(x, conv_weight, conv_bias, dconvolved, None, None, None, dx, True)
        _, dconv_weight, dconv_bias, _ = given
        gradients = (
            dxz, dconv_weight.unsqueeze(1), dconv_bias, dx_proj, ddelta_proj, dout_proj, dout_bias, dA, dB, dC, dD,
            ddelta_bias,
        )
        return (*gradients, None)


def _deltas(x_dbl: Tensor, delta_proj: Tensor, x: Tensor) -> Tensor:
    """The time steps (b, d, l), channels slowest."""
    return (delta_proj @ x_dbl[:, : delta_proj.shape[1]].t()).view(-1, x.shape[0], x.shape[2]).transpose(0, 1)


def _states_of(columns: Tensor, x: Tensor) -> Tensor:
    """(b l, n) as (b, 1, n, l)."""
    return columns.view(x.shape[0], x.shape[2], -1).transpose(1, 2).unsqueeze(1).contiguous()


def mamba_inner_fn(
    xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B=None, C=None,
    D=None, delta_bias=None, B_proj_bias=None, C_proj_bias=None, delta_softplus=True, checkpoint_lvl=1,
    b_rms_weight=None, c_rms_weight=None, dt_rms_weight=None, b_c_dt_rms_eps=1e-6,
):  # fmt: skip
    """xz: (b, 2 d, l). The library gives the norms' weights no gradients."""
    norms = tuple(None if weight is None else weight.detach() for weight in (b_rms_weight, c_rms_weight, dt_rms_weight))
    return _MambaInner.apply(
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B, C, D,
        delta_bias, norms,
    )


# ---- the state space dual ----


def _sizes(x: Tensor, B: Tensor, chunk: int) -> dict[str, int]:
    b, l, h, p = x.shape
    return {"b": b, "l": l, "h": h, "p": p, "g": B.shape[2], "n": B.shape[3], "c": math.ceil(l / chunk), "q": chunk}


def _of_states(s: dict) -> int:
    """FLOPs of one product of the tokens with the states."""
    return 2 * s["b"] * s["l"] * s["h"] * s["p"] * s["n"]


def _of_scores(s: dict) -> int:
    """... of the heads' values with the scores of a chunk. Products above the diagonal are not deducted, as in
    attention."""
    return 2 * s["b"] * s["l"] * s["q"] * s["h"] * s["p"]


def _of_groups(s: dict) -> int:
    """... of the groups' C and B, or of their gradients with one of them."""
    return 2 * s["b"] * s["c"] * s["g"] * s["q"] * s["q"] * s["n"]


def _made(like: Tensor, shape: tuple[int, ...], dtype=torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _chunk_sums(dt, A, dt_bias, s) -> tuple[Tensor, Tensor]:
    steps, sums = (_made(dt, (s["b"], s["h"], s["c"], s["q"])) for _ in range(2))
    launch("mamba_ssm::chunk_cumsum_fwd", [dt, A, dt_bias], [steps, sums])
    return sums, steps


def _chunk_states(B, x, dt, sums, s) -> Tensor:
    states = _made(x, (s["b"], s["c"], s["h"], s["p"], s["n"]))
    launch("mamba_ssm::chunk_state_fwd", [B, x, dt, sums], [states], _of_states(s), x.dtype)
    return states


def _pass_states(states, sums, initial_states, dtype, s) -> tuple[Tensor, Tensor]:
    passed = _made(states, states.shape, dtype)
    final = _made(states, (s["b"], s["h"], s["p"], s["n"]))
    launch("mamba_ssm::state_passing_fwd", [states, sums[..., -1], initial_states], [passed, final])
    return passed, final


def _group_scores(C, B, s) -> Tensor:
    scores = _made(C, (s["b"], s["c"], s["g"], s["q"], s["q"]))
    launch("mamba_ssm::bmm_chunk_fwd", [C, B], [scores], _of_groups(s), C.dtype)
    return scores


def _dual_forward(x, dt, A, B, C, chunk, D, z, dt_bias, initial_states):
    """The output, the same before the gate, the sums, the final states."""
    s = _sizes(x, B, chunk)
    sums, steps = _chunk_sums(dt, A, dt_bias, s)
    states = _chunk_states(B, x, steps, sums, s)
    states, final = _pass_states(states, sums, initial_states, C.dtype, s)
    scores = _group_scores(C, B, s)
    out = _made(x, x.shape, x.dtype)
    ungated = None if z is None else _made(x, x.shape, x.dtype)
    launch(
        "mamba_ssm::chunk_scan_fwd",
        [scores, x, steps, sums, C, states, D, z],
        [out, ungated],
        _of_states(s) + _of_scores(s),
        x.dtype,
    )
    return out, ungated, sums, final


def _splits(s: dict) -> int:
    """Parts in which the heads of a group are reduced."""
    of_group = s["h"] // s["g"]
    return math.ceil(of_group / max(min(math.ceil(s["b"] * s["c"] * s["h"] / _MULTIPROCESSORS), of_group), 1))


def _dual_backward(
    dout, x, dt, A, B, C, out, chunk, D, z, dt_bias, initial_states, dfinal, dx=None, ddt=None, dB=None, dC=None,
    dz=None, again=False,
):
    """The gradients of x, dt, A, B, C, D, z, dt_bias and the initial states, and the gated output again. The states are
    computed once more."""
    s = _sizes(x, B, chunk)
    dout = _rows_dense(dout)
    dB, dC, ddt = (torch.empty_like(t) if given is None else given for t, given in ((B, dB), (C, dC), (dt, ddt)))
    dt_in = dt.clone()
    sums, steps = _chunk_sums(dt_in, A, dt_bias, s)
    scores = _group_scores(C, B, s)
    states = _chunk_states(B, x, steps, sums, s)
    states, _ = _pass_states(states, sums, initial_states, torch.float32, s)
    gated = dD = None
    if z is not None:
        dz = torch.empty_like(z) if dz is None else dz
        gated = torch.empty_like(x) if again else None
        ungated_dout = torch.empty_like(dout)
        dD = None if D is None else torch.empty_like(D)
        launch("mamba_ssm::chunk_scan_bwd_dz", [dout, out, z, x, D], [dz, ungated_dout, dD, gated])
        dout = ungated_dout
    dstates = _made(x, states.shape, states.dtype)
    launch("mamba_ssm::chunk_scan_bwd_dstates", [C, sums, dout], [dstates], _of_states(s), x.dtype)
    passed, converted = _made(x, states.shape, x.dtype), _made(x, states.shape, x.dtype)
    dinitial = None if initial_states is None else torch.empty_like(passed[:, 0])
    parts = _made(x, (s["b"], s["h"], s["c"], math.ceil(s["p"] * s["n"] / _PART_OF_STATE)))
    launch(
        "mamba_ssm::state_passing_bwd", [dstates, states, sums[..., -1], dfinal], [passed, parts, dinitial, converted]
    )
    dchunk, dstates, states = parts.sum(-1), passed, converted
    dx = torch.empty_like(x) if dx is None else dx
    dsteps = _made(x, steps.shape)
    dD_parts = None
    if D is not None:
        dD_parts = torch.zeros(
            math.ceil(s["q"] / _ROWS_OF_CHUNK), s["b"], s["c"], s["h"], D[0].numel(), dtype=torch.float32,
            device=x.device,
        )
    launch(
        "mamba_ssm::chunk_scan_chunk_state_bwd_dx",
        [x, scores, dout, steps, sums, D, B, dstates],
        [dx, dsteps, dD_parts],
        _of_states(s) + _of_scores(s),
        x.dtype,
    )
    if dD is None and D is not None:
        dD = dD_parts.sum((0, 1, 2)).view(D.shape).to(D.dtype)
    splits = _splits(s)

    def reduced(kernel, reads) -> tuple[Tensor, Tensor]:
        parts, dsums = _made(x, (s["b"], s["l"], splits, s["g"], s["n"])), _made(x, sums.shape)
        launch(kernel, reads, [parts, dsums], _of_states(s), x.dtype)
        return parts.sum(2), dsums

    dB_states, dsums_next = reduced("mamba_ssm::chunk_state_bwd_db", [x, dstates, B, steps, sums])
    dsums_next.cumsum_(-1)
    dC_states, dsums_before = reduced("mamba_ssm::chunk_scan_bwd_dc", [dout, states, C, sums])
    dscores = _made(x, (s["b"], s["c"], splits, s["g"], s["q"], s["q"]))
    launch("mamba_ssm::chunk_scan_bwd_dcb", [x, dout, steps, sums], [dscores], _of_scores(s), x.dtype)
    dscores = dscores.sum(2)
    launch("mamba_ssm::bmm_chunk_bwd", [C, dscores, dB_states], [dB], _of_groups(s), C.dtype)
    launch("mamba_ssm::bmm_chunk_bwd", [B, dscores, dC_states], [dC], _of_groups(s), C.dtype)
    dsums_before[..., -1] += dchunk
    dsums_before = dsums_before.flip([-1]).cumsum(-1).flip([-1])
    dsums = _made(x, (s["b"], s["h"], s["c"], math.ceil(s["q"] / _ROWS_OF_CHUNK), s["q"]))
    launch("mamba_ssm::chunk_scan_bwd_ddAcs", [x, dout, steps, sums, scores], [dsums], _of_scores(s), x.dtype)
    dsums = dsums.sum(3)
    dsums += dsums_next + dsums_before
    dA = torch.empty_like(A, dtype=torch.float32)
    dbias = None if dt_bias is None else torch.empty_like(dt_bias, dtype=torch.float32)
    launch("mamba_ssm::chunk_cumsum_bwd", [dsums, dsteps, dt_in, A, dt_bias], [ddt, dA, dbias])
    return dx, ddt, dA, dB, dC, dD, dz, dbias, dinitial, gated


class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dt, A, B, C, chunk, D, z, dt_bias, initial_states, return_final_states):
        B, C = _rows_dense(B), _rows_dense(C)
        out, ungated, sums, final = _dual_forward(x, dt, A, B, C, chunk, D, z, dt_bias, initial_states)
        ctx.chunk = chunk
        ctx.save_for_backward(out if z is None else ungated, x, dt, sums, A, B, C, D, z, dt_bias, initial_states)
        return (out, final) if return_final_states else out

    @staticmethod
    def backward(ctx, dout, *dfinal):
        out, x, dt, _, A, B, C, D, z, dt_bias, initial_states = ctx.saved_tensors
        given = _dual_backward(dout, x, dt, A, B, C, out, ctx.chunk, D, z, dt_bias, initial_states, (*dfinal, None)[0])
        dx, ddt, dA, dB, dC, dD, dz, dbias, dinitial, _ = given
        return dx, ddt, dA, dB, dC, None, dD, dz, dbias, dinitial, None


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False, return_varlen_states=False,
    state_dtype=None,
):  # fmt: skip
    """x, z: (b, l, h, p); dt: (b, l, h); A: (h,); B, C: (b, l, g, n)."""
    return _ChunkScan.apply(x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, return_final_states)


def _gated_norm(x, weight, z, groups) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x)
    rstd = _made(x, (groups * x.shape[0],))
    launch("mamba_ssm::layer_norm_gated_fwd", [x, weight, z], [out, rstd])
    return out, rstd


def _gated_norm_backward(dy, x, weight, rstd, z, dz, groups, again: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    dx = torch.empty_like(x)
    out = torch.empty_like(x) if again else None
    width = x.shape[1] // groups
    warps = min(max((1 << (width - 1).bit_length()) // 256, 1), 8)
    parts = _made(x, (math.ceil(_MULTIPROCESSORS * math.ceil(4 / warps) / groups), x.shape[1]))
    launch("mamba_ssm::layer_norm_gated_bwd", [x, weight, z, dy, rstd], [dx, parts, dz, out])
    return dx, parts.sum(0).to(weight.dtype), out


class _SplitConvScan(torch.autograd.Function):
    """A whole Mamba 2 mixer behind its first projection. Convolution, states and norm are computed again in the
    backward."""

    @staticmethod
    def forward(
        ctx, zxbcdt, conv_weight, conv_bias, dt_bias, A, D, chunk, initial_states, final_states, silu, norm_weight,
        out_weight, out_bias, p, g,
    ):
        ctx.shape = (chunk, silu, p, g)
        z, xBC, dt, x, B, C, _ = _parts(zxbcdt, conv_weight, conv_bias, D, silu, p, g)
        dual = (x, dt, A, B, C, chunk, D)
        if norm_weight is None:
            out, kept, _, final = _dual_forward(*dual, z, dt_bias, initial_states)
            out, rstd = out.flatten(2), None
        else:
            kept, _, _, final = _dual_forward(*dual, None, dt_bias, initial_states)
            out, rstd = _gated_norm(kept.view(-1, z.shape[2] * p), norm_weight, z.flatten(0, 1).flatten(1), g)
            out = out.view(*kept.shape[:2], -1)
        if out_weight is not None:
            out = F.linear(out, out_weight, out_bias)
        ctx.save_for_backward(
            zxbcdt, conv_weight, conv_bias, kept, A, D, dt_bias, initial_states, norm_weight, rstd, out_weight, out_bias
        )
        return (out, final) if final_states else out

    @staticmethod
    def backward(ctx, dout, *dfinal):
        zxbcdt, conv_weight, conv_bias, kept, A, D, dt_bias, initial_states, norm_weight, rstd, out_weight, out_bias = (
            ctx.saved_tensors
        )
        chunk, silu, p, g = ctx.shape
        again = out_weight is not None
        z, xBC, dt, x, B, C, sizes = _parts(zxbcdt, conv_weight, conv_bias, D, silu, p, g)
        dzxbcdt = torch.empty_like(zxbcdt)
        dz, dxBC_given, ddt = dzxbcdt.split(sizes, -1)
        dxBC = torch.empty_like(xBC)
        inner = [x.shape[2] * p, *[g * B.shape[3]] * 2]
        dx, dB, dC = (part.view(like.shape) for part, like in zip(dxBC.split(inner, -1), (x, B, C)))
        dz = dz.view(z.shape)
        after = dout
        if out_weight is not None:
            dout = F.linear(dout, out_weight.t())
        dnorm = None
        given = {"dx": dx, "ddt": ddt, "dB": dB, "dC": dC}
        dual = (x, dt, A, B, C, kept, chunk, D)
        states = (dt_bias, initial_states, (*dfinal, None)[0])
        if norm_weight is None:
            gradients = _dual_backward(dout.reshape(kept.shape), *dual, z, *states, **given, dz=dz, again=again)
            multiplied = gradients[-1]
        else:
            rows = (
                dout.reshape(-1, inner[0]), kept.view(-1, inner[0]), norm_weight, rstd, z.flatten(0, 1).flatten(1),
                dz.flatten(0, 1).flatten(1),
            )
            dout, dnorm, multiplied = _gated_norm_backward(*rows, g, again)
            gradients = _dual_backward(dout.view(kept.shape), *dual, None, *states, **given)
        _, _, dA, _, _, dD, _, dbias, dinitial, _ = gradients
        dout_weight = dout_bias = None
        if out_weight is not None:
            dout_weight = after.reshape(-1, after.shape[-1]).t() @ multiplied.reshape(-1, inner[0])
            dout_bias = None if out_bias is None else after.sum((0, 1))
        columns = [t.transpose(1, 2) for t in map(_columns_aligned, (xBC, dxBC, dxBC_given))]
        dconv = causal_conv1d.backward_kernel(
            columns[0], conv_weight, conv_bias, columns[1], None, None, None, columns[2], silu
        )
        _, dconv_weight, dconv_bias, _ = dconv
        gradients = (
            dzxbcdt, dconv_weight, dconv_bias, dbias, dA, dD, None, dinitial, None, None, dnorm, dout_weight, dout_bias,
        )
        return (*gradients, None, None)


def _columns_aligned(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(1) % 8 == 0 else tensor.contiguous()


def _parts(zxbcdt, conv_weight, conv_bias, D, silu: bool, p: int, g: int):
    """z, xBC and dt as the projection gives them, x, B and C as the convolution does, and the widths of the first
    three."""
    h = D.shape[0]
    n = (conv_weight.shape[0] - h * p) // g // 2
    sizes = [h * p, h * p + 2 * g * n, h]
    z, xBC, dt = zxbcdt.split(sizes, -1)
    convolved = causal_conv1d.forward_kernel(
        _columns_aligned(xBC).transpose(1, 2), conv_weight, conv_bias, None, None, None, silu
    ).transpose(1, 2)
    x, B, C = convolved.split([h * p, g * n, g * n], -1)
    heads = [t.unflatten(-1, (count, -1)) for t, count in ((z, h), (x, h), (B, g), (C, g))]
    return heads[0], xBC, dt, *heads[1:], sizes


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None, seq_idx=None,
    dt_limit=(0.0, float("inf")), return_final_states=False, activation="silu", rmsnorm_weight=None, rmsnorm_eps=1e-6,
    outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True, state_dtype=None,
):  # fmt: skip
    """zxbcdt: (b, l, 2 h p + 2 g n + h)."""
    return _SplitConvScan.apply(
        zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states, return_final_states,
        activation in ("silu", "swish"), rmsnorm_weight, outproj_weight, outproj_bias,
        D.shape[1] if D.dim() == 2 else headdim, ngroups,
    )
