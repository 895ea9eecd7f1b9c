# SPDX-License-Identifier: Apache-2.0
"""scaled_dot_product_attention as a CUDA device would run it.

The choice among the fused kernels asks the driver for the device's properties; without a driver it falls to the unfused
one. Here the rules are applied to fake tensors (reference: aten/native/transformers/cuda/sdp_utils.cpp and
attention.cpp of torch 2.11). The chosen kernel is called by its own name, so that autograd, memory and FLOPs are that
kernel's. With "cpu" it is the kernel that CPU ranks have.

Registered at the AutogradCUDA key: every way of calling the function comes here, and only for CUDA tensors.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

aten = torch.ops.aten

_ORDER = {
    "auto": ("flash", "efficient"),
    "cudnn": ("cudnn", "flash", "efficient"),
    "flash": ("flash", "efficient"),
    "efficient": ("efficient",),
    "cpu": ("cpu",),
    "math": (),
}
_HALF = (torch.float16, torch.bfloat16)
_MAX_FLASH_HEAD_DIM = 256
_MAX_CUDNN_HEAD_DIM = 128


def _fits_any(q, k, v) -> bool:
    """Rules shared by the fused kernels: 4-D, not empty, one dtype, last dimension dense."""
    if not (q.dim() == k.dim() == v.dim() == 4 and q.dtype == k.dtype == v.dtype):
        return False
    if not (q.size(0) == k.size(0) == v.size(0)) or 0 in (q.size(2), k.size(2)):
        return False
    return all(t.stride(-1) == 1 or t.size(-1) == 1 for t in (q, k, v))


def _heads_fit(q, k, v, enable_gqa: bool) -> bool:
    if enable_gqa:
        return k.size(1) == v.size(1) and q.size(1) % k.size(1) == 0
    return q.size(1) == k.size(1) == v.size(1)


def _fits_cudnn(q, k, v, mask, dropout_p, is_causal, enable_gqa) -> bool:
    d_q, d_v = q.size(-1), v.size(-1)
    return (
        q.dtype in _HALF
        and _heads_fit(q, k, v, enable_gqa)
        and d_q % 8 == 0
        and d_v % 8 == 0
        and max(d_q, d_v) <= _MAX_CUDNN_HEAD_DIM
        and k.size(2) != 1
        and (dropout_p * 16).is_integer()
    )


def _fits_flash(q, k, v, mask, dropout_p, is_causal, enable_gqa) -> bool:
    return (
        q.dtype in _HALF
        and mask is None
        and _heads_fit(q, k, v, enable_gqa)
        and q.size(-1) == k.size(-1) == v.size(-1) <= _MAX_FLASH_HEAD_DIM
        and not (is_causal and q.size(2) != k.size(2))
    )


def _fits_efficient(q, k, v, mask, dropout_p, is_causal, enable_gqa) -> bool:
    if q.dtype not in (*_HALF, torch.float32):
        return False
    alignment = 8 if q.dtype in _HALF else 4
    return (
        _heads_fit(q, k, v, False)  # no grouped kv heads in this kernel
        and q.size(-1) == k.size(-1)
        and q.size(-1) % alignment == 0
        and v.size(-1) % alignment == 0
    )


def _fits_cpu(q, k, v, mask, dropout_p, is_causal, enable_gqa) -> bool:
    """aten/native/transformers/sdp_utils_cpp.cpp: CPU tensors have this kernel and the unfused one."""
    return (
        q.dtype in (*_HALF, torch.float32, torch.float64)
        and dropout_p == 0
        and _heads_fit(q, k, v, enable_gqa)
        and q.size(-1) == k.size(-1) == v.size(-1)
        and all(t.stride(-1) == 1 for t in (q, k, v))
        and (mask is None or (mask.dim() in (2, 4) and not mask.requires_grad))
    )


_FITS = {"cudnn": _fits_cudnn, "flash": _fits_flash, "efficient": _fits_efficient, "cpu": _fits_cpu}


def choose(order: str, q, k, v, mask, dropout_p, is_causal, enable_gqa) -> str:
    """The kernel's name: cudnn, flash, efficient, cpu or math."""
    if _fits_any(q, k, v):
        for kernel in _ORDER[order]:
            if _FITS[kernel](q, k, v, mask, dropout_p, is_causal, enable_gqa):
                return kernel
    return "math"


def _additive(mask, dtype):
    """A boolean mask (True: take part) as one to add."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    bias = torch.zeros_like(mask, dtype=dtype)
    return bias.masked_fill_(mask.logical_not(), -math.inf)


def _aligned_mask(mask, q, k):
    """The memory-efficient kernel reads rows whose pitch is a multiple of 16 elements, and a mask of full shape."""
    length = mask.size(-1)
    if length % 16:
        mask = F.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(q.size(0), q.size(1), q.size(2), k.size(2))


def _pad_head_dim(t):
    return t if t.size(-1) % 8 == 0 else F.pad(t, (0, 8 - t.size(-1) % 8))


def _additive_on_cpu(mask, dtype):
    if mask is None or mask.dtype != torch.bool:
        return mask
    # In the order in which torch makes them.
    low, zero = (torch.scalar_tensor(value, dtype=dtype, device=mask.device) for value in (-math.inf, 0.0))
    return torch.where(mask, zero, low)


def _attend(order: str, q, k, v, mask, dropout_p, is_causal, scale, enable_gqa):
    if order == "cpu" and q.dim() == k.dim() == v.dim() == 3:  # one batch
        whole = (t.unsqueeze(0) for t in (q, k, v))
        return _attend(order, *whole, mask, dropout_p, is_causal, scale, enable_gqa).squeeze(0)
    kernel = choose(order, q, k, v, mask, dropout_p, is_causal, enable_gqa)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    if kernel == "cudnn":
        bias = _additive(mask, q.dtype)
        if bias is not None:
            bias = bias.expand(q.size(0), q.size(1), q.size(2), k.size(2))
        return aten._scaled_dot_product_cudnn_attention(
            q, k, v, bias, needs_grad, dropout_p, is_causal, False, scale=scale
        )[0]
    if kernel == "flash":
        head_dim = q.size(-1)
        scale = 1 / math.sqrt(head_dim) if scale is None else scale
        q, k, v = _pad_head_dim(q), _pad_head_dim(k), _pad_head_dim(v)
        out = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        return out if out.size(-1) == head_dim else out[..., :head_dim]
    if kernel == "efficient":
        bias = _additive(mask, q.dtype)
        if bias is not None:
            bias = _aligned_mask(bias, q, k)
        return aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, needs_grad, dropout_p, is_causal, scale=scale
        )[0]
    if kernel == "cpu":
        bias = _additive_on_cpu(mask, q.dtype)
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, dropout_p, is_causal, attn_mask=bias, scale=scale
        )[0]
    bias = _additive(mask, q.dtype)
    return aten._scaled_dot_product_attention_math(
        q, k, v, bias, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


@contextlib.contextmanager
def device_attention(order: str = "auto") -> Iterator[None]:
    """Inside, attention on CUDA tensors takes the kernel that a device takes."""

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
        return _attend(order, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
    try:
        yield
    finally:
        library._destroy()
