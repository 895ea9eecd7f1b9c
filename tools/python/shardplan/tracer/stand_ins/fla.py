# SPDX-License-Identifier: Apache-2.0
"""flash-linear-attention 0.5.2: the gated delta rule in chunks (fla/ops/gated_delta_rule) and Kimi delta attention
(fla/ops/kda), kernel by kernel.

Letters are the library's: B batch, T tokens, H heads of keys, HV heads of values, K and V a head's widths, BT tokens of
a chunk, NT chunks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from shardplan.tracer.stand_ins.launch import launch

_SUBCHUNK = 16  # of a block of the triangular solve
_WIDE, _NARROW = 128, 32  # columns of keys that a block takes: of the gated delta rule's gradients, of KDA's


class _Sizes(NamedTuple):
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    BT: int

    @property
    def NT(self) -> int:
        return math.ceil(self.T / self.BT)

    def products(self, states: int = 0, keys: int = 0, values: int = 0, scores: int = 0) -> int:
        """FLOPs of so many products of all tokens with states (K V), within chunks with keys (BT K) and values (BT V),
        and of scores with scores."""
        return (
            2
            * self.B
            * self.T
            * self.HV
            * (states * self.K * self.V + self.BT * (keys * self.K + values * self.V + scores * self.BT))
        )

    def solve(self) -> int:
        """FLOPs of the inverses of the unit triangles, by blocks: one that is d below the diagonal takes d + 1
        products. BT^3 / 2 each for BT = 64."""
        blocks = self.BT // _SUBCHUNK
        return self.B * self.NT * self.HV * 2 * _SUBCHUNK**3 * sum((blocks - d) * (d + 1) for d in range(1, blocks))


def _sizes(k: Tensor, v: Tensor, chunk: int) -> _Sizes:
    return _Sizes(*k.shape[:3], v.shape[2], k.shape[3], v.shape[3], chunk)


def _made(like: Tensor, *shape: int, dtype: torch.dtype | None = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=like.dtype if dtype is None else dtype, device=like.device)


def _norm(x: Tensor) -> tuple[Tensor, Tensor]:
    y, rstd = torch.empty_like(x), _made(x, *x.shape[:-1])
    launch("fla::l2norm_fwd", [x], [y, rstd])
    return y, rstd


def _norm_backward(y: Tensor, rstd: Tensor, dy: Tensor) -> Tensor:
    dx = torch.empty_like(y)
    launch("fla::l2norm_bwd", [y, rstd, dy], [dx])
    return dx


def _cumulated(g: Tensor, *gate: Tensor | None) -> Tensor:
    """The decay summed within chunks, in float32; made of the gate's input where `gate` is there."""
    sums = torch.empty_like(g, dtype=torch.float32)
    launch("fla::gate_chunk_cumsum" if gate else "fla::chunk_local_cumsum", [g, *gate], [sums])
    return sums


def _gate_backward(g, A_log, dt_bias, dg, s: _Sizes):
    made = torch.empty_like(g, dtype=torch.float32)
    parts = None if A_log is None else _made(g, s.NT, s.HV)
    launch("fla::gate_bwd", [g, A_log, dt_bias, dg], [made, parts])
    dA = None if A_log is None else parts.sum(0).view_as(A_log).to(A_log.dtype)
    dbias = None if dt_bias is None else made.view(-1, dt_bias.numel()).sum(0).to(dt_bias.dtype)
    return made, dA, dbias


def _states(k, w, u, g, initial_state, final: bool, s: _Sizes) -> tuple[Tensor, Tensor, Tensor | None]:
    h = _made(k, s.B, s.NT, s.HV, s.K, s.V, dtype=None)
    last = torch.zeros(s.B, s.HV, s.K, s.V, dtype=torch.float32, device=k.device) if final else None
    v_new = torch.empty_like(u)
    launch(
        "fla::chunk_gated_delta_rule_fwd_h",
        [k, u, w, g, initial_state],
        [h, v_new, last],
        s.products(states=2),
        k.dtype,
    )
    return h, v_new, last


def _states_backward(q, k, w, g, initial_state, dlast, do, dv, s: _Sizes) -> tuple[Tensor, Tensor | None, Tensor]:
    dh = _made(q, s.B, s.NT, s.HV, s.K, s.V, dtype=None)
    dinitial = None if initial_state is None else torch.empty_like(initial_state, dtype=torch.float32)
    made = torch.empty_like(dv)
    launch(
        "fla::chunk_gated_delta_rule_bwd_dhu",
        [q, k, w, g, dlast, do, dv],
        [dh, dinitial, made],
        s.products(states=3),
        q.dtype,
    )
    return dh, dinitial, made


def _by_keys(gradient: Tensor, s: _Sizes) -> Tensor:
    """Heads of values that share a head of keys are summed."""
    return gradient if s.H == s.HV else gradient.view(s.B, s.T, s.H, s.HV // s.H, s.K).sum(3)


class _Preparation:
    """Work of both functions before their chunks: arguments without gaps, norms of queries and keys, sigmoid of
    beta."""

    def __init__(self, q, k, v, g, beta, norm: bool, sigmoid: bool):
        q, k, self.v, self.g, self.raw_beta = (t.contiguous() for t in (q, k, v, g, beta))
        self._given = q, k  # the library holds them as long
        (self.q, self.q_rstd), (self.k, self.k_rstd) = (_norm(t) if norm else (t, None) for t in (q, k))
        self.beta = self.raw_beta
        if sigmoid:
            self.beta = torch.empty_like(self.raw_beta, dtype=torch.float32)
            launch("fla::beta_sigmoid_fwd", [self.raw_beta], [self.beta])

    def saved(self) -> tuple:
        return self.q, self.q_rstd, self.k, self.k_rstd, self.v, self.raw_beta, self.beta


def _finished(saved: list, dq, dk, dv, dbeta) -> tuple:
    """The gradients of q, k, v and beta as they came."""
    q, q_rstd, k, k_rstd, v, raw_beta, beta = saved
    if q_rstd is not None:
        dq, dk = _norm_backward(q, q_rstd, dq), _norm_backward(k, k_rstd, dk)
    if raw_beta is not beta:
        made = torch.empty_like(raw_beta)
        launch("fla::beta_sigmoid_bwd", [raw_beta, dbeta], [made])
        dbeta = made
    return tuple(t.to(like.dtype) for t, like in zip((dq, dk, dv, dbeta), (q, k, v, raw_beta)))


# ---- the gated delta rule ----


def _transformed(k, v, beta, A, g, s: _Sizes) -> tuple[Tensor, Tensor]:
    w, u = _made(k, s.B, s.T, s.HV, s.K, dtype=None), torch.empty_like(v)
    launch("fla::recompute_w_u_fwd", [k, v, beta, A, g], [w, u], s.products(keys=1, values=1), k.dtype)
    return w, u


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial_state, final, norm, sigmoid, gated, A_log, dt_bias, chunk):
        given = _Preparation(q, k, v, g, beta, norm, sigmoid)
        q, k, v, beta = given.q, given.k, given.v, given.beta
        s = ctx.sizes = _sizes(k, v, chunk)
        ctx.gated = gated
        sums = _cumulated(given.g, A_log, dt_bias) if gated else _cumulated(given.g)
        A = torch.zeros(s.B, s.T, s.HV, s.BT, dtype=k.dtype, device=k.device)
        launch(
            "fla::chunk_gated_delta_rule_fwd_kkt_solve", [k, sums, beta], [A], s.products(keys=1) + s.solve(), k.dtype
        )
        w, u = _transformed(k, v, beta, A, sums, s)
        h, v_new, last = _states(k, w, u, sums, initial_state, final, s)
        o = torch.empty_like(v_new)
        launch("fla::chunk_fwd_o", [q, k, v_new, h, sums], [o], s.products(states=1, keys=1, values=1), q.dtype)
        ctx.save_for_backward(*given.saved(), given.g if gated else None, sums, A, initial_state, A_log, dt_bias)
        return o, last

    @staticmethod
    def backward(ctx, do, dlast):
        *saved, g, sums, A, initial_state, A_log, dt_bias = ctx.saved_tensors
        q, _, k, _, v, _, beta = saved
        s, do = ctx.sizes, do.contiguous()
        w, u = _transformed(k, v, beta, A, sums, s)
        h, v_new, _ = _states(k, w, u, sums, initial_state, False, s)
        dv = torch.empty_like(do)
        launch("fla::chunk_bwd_dv_local", [q, k, sums, do], [dv], s.products(keys=1, values=1), q.dtype)
        dh, dinitial, dv = _states_backward(q, k, w, sums, initial_state, dlast, do, dv, s)
        dq, dk = (_made(k, s.B, s.T, s.HV, s.K, dtype=None) for _ in range(2))
        parts = _made(k, math.ceil(s.K / _WIDE), *sums.shape)
        dw = torch.empty_like(w)
        launch(
            "fla::chunk_bwd_dqkwg",
            [q, k, v_new, h, sums, do, dh, w, dv],
            [dq, dk, parts, dw],
            s.products(states=3, keys=2, values=1),
            q.dtype,
        )
        dq, dk, dg = _by_keys(dq, s), _by_keys(dk, s), parts.sum(0)
        dk2, dv2, dg2, dbeta = (
            _made(k, s.B, s.T, s.HV, s.K, dtype=None), torch.empty_like(v), torch.empty_like(sums),
            torch.empty_like(beta),
        )
        of_solve = s.products(keys=5, values=2, scores=2)
        launch("fla::prepare_wy_repr_bwd", [k, v, beta, sums, A, dw, dv], [dk2, dv2, dbeta, dg2], of_solve, k.dtype)
        dk.add_(_by_keys(dk2, s))
        dg.add_(dg2)
        dg = _cumulated(dg)
        dA = dbias = None
        if ctx.gated:
            dg, dA, dbias = _gate_backward(g, A_log, dt_bias, dg, s)
        dq, dk, dv, dbeta = _finished(saved, dq, dk, dv2, dbeta)
        return dq, dk, dv, dg, dbeta, dinitial, None, None, None, None, dA, dbias, None


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
    chunk_indices=None, cp_context=None, **kwargs,
):  # fmt: skip
    """q, k: (B, T, H, K); v: (B, T, HV, V); g, beta: (B, T, HV)."""
    return _GatedDeltaRule.apply(
        q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel,
        kwargs.get("use_gate_in_kernel", False), kwargs.get("A_log"), kwargs.get("dt_bias"),
        kwargs.get("chunk_size", 64),
    )


# ---- Kimi delta attention: a decay for each key's channel ----


def _transformed_by_channel(k, v, beta, A, g, q, s: _Sizes) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    w, kg = (_made(k, s.B, s.T, s.HV, s.K, dtype=None) for _ in range(2))
    u = torch.empty_like(v)
    qg = None if q is None else _made(k, s.B, s.T, s.HV, s.K, dtype=None)
    launch("fla::recompute_w_u_fwd_kda", [q, k, v, beta, A, g], [w, u, qg, kg], s.products(keys=1, values=1), k.dtype)
    return w, u, qg, kg


class _KimiDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, A_log, dt_bias, initial_state, final, norm, gated, sigmoid, keep, chunk):
        given = _Preparation(q, k, v, g, beta, norm, sigmoid)
        q, k, v, beta = given.q, given.k, given.v, given.beta
        s = ctx.sizes = _sizes(k, v, chunk)
        ctx.gated = gated
        sums = _cumulated(given.g, A_log, dt_bias) if gated else _cumulated(given.g)
        Aqk = _made(k, s.B, s.T, s.HV, s.BT, dtype=None)
        Akk = torch.zeros(s.B, s.T, s.HV, s.BT, dtype=k.dtype, device=k.device)
        diagonal = _made(k, s.B, s.T, s.HV, min(_SUBCHUNK, s.BT))
        of_diagonal = s.products(keys=2) * diagonal.shape[-1] // s.BT  # sums, not products of matrices
        launch(
            "fla::chunk_kda_fwd_intra_token_parallel", [q, k, sums, beta], [Aqk, diagonal], of_diagonal, torch.float32
        )
        of_rest = s.products(keys=2) - of_diagonal + s.solve()
        launch("fla::chunk_kda_fwd_inter_solve_fused", [q, k, sums, beta, diagonal], [Aqk, Akk], of_rest, torch.float32)
        w, u, qg, kg = _transformed_by_channel(k, v, beta, Akk, sums, q if keep else None, s)
        h, v_new, last = _states(kg, w, u, sums, initial_state, final, s)
        o = torch.empty_like(v)
        launch("fla::chunk_gla_fwd_o_gk", [q, v_new, sums, Aqk, h], [o], s.products(states=1, values=1), q.dtype)
        again = (w, u, qg, kg, v_new, h) if keep else (None,) * 6
        kept = None if gated and not keep else sums
        ctx.save_for_backward(*given.saved(), given.g, kept, Aqk, Akk, A_log, dt_bias, initial_state, *again)
        return o, last

    @staticmethod
    def backward(ctx, do, dlast):
        *saved, g, sums, Aqk, Akk, A_log, dt_bias, initial_state, w, u, qg, kg, v_new, h = ctx.saved_tensors
        q, _, k, _, v, _, beta = saved
        s, do = ctx.sizes, do.contiguous()
        if w is None:  # computed once more
            sums = _cumulated(g, A_log, dt_bias) if ctx.gated else sums
            w, u, qg, kg = _transformed_by_channel(k, v, beta, Akk, sums, q, s)
            h, v_new, _ = _states(kg, w, u, sums, initial_state, False, s)
        dAqk, dv = _made(k, s.B, s.T, s.HV, s.BT), torch.empty_like(do)
        launch("fla::chunk_kda_bwd_dAv", [q, k, v_new, Aqk, do], [dv, dAqk], s.products(values=2), q.dtype)
        dh, dinitial, dv = _states_backward(qg, kg, w, sums, initial_state, dlast, do, dv, s)
        dq, dk = (_made(k, s.B, s.T, s.HV, s.K) for _ in range(2))
        dv2 = torch.empty_like(v)
        dg, dbeta, dAkk = (torch.empty_like(t, dtype=torch.float32) for t in (sums, beta, Akk))
        reads = [q, k, v, v_new, sums, beta, Akk, h, do, dh, dv]
        launch(
            "fla::chunk_kda_bwd_wy_dqkg_fused",
            reads,
            [dq, dk, dv2, dg, dbeta, dAkk],
            s.products(states=3, keys=2, values=2, scores=2),
            q.dtype,
        )
        dq2, dk2, parts, dg2 = (
            torch.empty_like(dq), torch.empty_like(dk), _made(k, math.ceil(s.K / _NARROW), *beta.shape),
            torch.empty_like(dg),
        )
        reads = [q, k, sums, beta, dAqk, dAkk, dq, dk, dg]
        launch("fla::chunk_kda_bwd_intra", reads, [dq2, dk2, parts, dg2], s.products(keys=4), torch.float32)
        dbeta = parts.sum(0).add_(dbeta)
        dq, dk, dg = _by_keys(dq2, s), _by_keys(dk2, s), _cumulated(dg2)
        dA = dbias = None
        if ctx.gated:
            dg, dA, dbias = _gate_backward(g, A_log, dt_bias, dg, s)
        dq, dk, dv, dbeta = _finished(saved, dq, dk, dv2, dbeta)
        return dq, dk, dv, dg.to(g.dtype), dbeta, dA, dbias, dinitial, None, None, None, None, None, None


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, cp_context=None, **kwargs,
):  # fmt: skip
    """q, k: (B, T, H, K); v: (B, T, HV, V); g: (B, T, HV, K); beta: (B, T, HV)."""
    return _KimiDelta.apply(
        q, k, v, g, beta, kwargs.get("A_log"), kwargs.get("dt_bias"), initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, disable_recompute,
        kwargs.get("chunk_size", 64),
    )
