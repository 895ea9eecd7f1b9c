# SPDX-License-Identifier: Apache-2.0
"""MPT, the GPT-like models of MosaicML's llm-foundry, as its benchmarks trained them in 2023 and 2024.

Blocks are pre-norm, without biases: LayerNorm in the low precision, one product for queries, keys and values, causal
flash attention, an MLP of four times the width with exact GELU. Positions are learned; the head is tied to the
embedding. The loss is flash-attn's fused cross entropy.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 50_368
# Composer computes cross entropy and perplexity of each micro-batch, each by itself in float32.
TRAIN_METRICS = 2


class _Unpad(torch.autograd.Function):
    """Rows without padding, of a batch that has none: a copy (flash_attn.bert_padding, IndexFirstAxis)."""

    @staticmethod
    def forward(context, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, rows)

    @staticmethod
    def backward(context, gradient: torch.Tensor):
        return torch.zeros_like(gradient, memory_format=torch.contiguous_format).copy_(gradient), None


class _Pad(torch.autograd.Function):
    """The reverse (IndexPutFirstAxis)."""

    @staticmethod
    def forward(context, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(rows)
        return torch.zeros_like(x, memory_format=torch.contiguous_format).copy_(x)

    @staticmethod
    def backward(context, gradient: torch.Tensor):
        (rows,) = context.saved_tensors
        return gradient.index_select(0, rows), None


class _Attention(nn.Module):
    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.Wqkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        parts = [_Unpad.apply(part, rows) for part in self.Wqkv(x).flatten(0, 1).chunk(3, dim=1)]
        heads = [part.view(batch, sequence, self.n_heads, -1).transpose(1, 2) for part in parts]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        padded = _Pad.apply(attended.reshape(batch * sequence, width), rows)
        return self.out_proj(padded.view(batch, sequence, width))


class _FeedForward(nn.Module):
    def __init__(self, d_model: int):
        super().__init__()
        self.up_proj = nn.Linear(d_model, 4 * d_model, bias=False)
        self.down_proj = nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


class _Block(nn.Module):
    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.norm_1 = nn.LayerNorm(d_model, bias=False)
        self.attn = _Attention(d_model, n_heads)
        self.norm_2 = nn.LayerNorm(d_model, bias=False)
        self.ffn = _FeedForward(d_model)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm_1(x), rows)
        return x + self.ffn(self.norm_2(x))


class MPT(nn.Module):
    def __init__(self, n_layers: int, d_model: int, n_heads: int, sequence: int):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, d_model)
        self.wpe = nn.Embedding(sequence, d_model)
        self.blocks = nn.ModuleList(_Block(d_model, n_heads) for _ in range(n_layers))
        self.norm_f = nn.LayerNorm(d_model, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(tokens.numel(), device=tokens.device)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(places)
        for block in self.blocks:
            x = block(x, rows)
        return F.linear(self.norm_f(x), self.wte.weight)


class _FusedCrossEntropy(torch.autograd.Function):
    """Reads the logits once and writes a loss each; the backward writes gradients over the logits
    (flash_attn.losses.cross_entropy)."""

    @staticmethod
    def forward(context, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(logits, labels)
        return logits.sum(dim=-1, dtype=torch.float32)

    @staticmethod
    def backward(context, gradient: torch.Tensor):
        logits, _ = context.saved_tensors
        return logits.mul(gradient.to(logits.dtype).unsqueeze(-1)), None


def build(row: dict):
    """The model of a row with n_layers, d_model, n_heads and sequence; its input; its loss."""
    model = MPT(row["n_layers"], row["d_model"], row["n_heads"], row["sequence"]).to(torch.bfloat16)
    tokens = torch.zeros(row["micro_batch"], row["sequence"], dtype=torch.long)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        flat, labels = logits.flatten(0, 1), tokens.flatten()
        with torch.no_grad():
            for _ in range(TRAIN_METRICS):
                F.cross_entropy(flat.float(), labels, reduction="sum")
        return _FusedCrossEntropy.apply(flat, labels).mean()

    return model, tokens, loss
