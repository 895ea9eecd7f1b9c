# SPDX-License-Identifier: Apache-2.0
"""The twin in Python of tests/executor/gpt_model.h."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, CONTEXT, WIDTH, HEADS, BLOCKS = 65, 64, 96, 4, 4


class Linear(nn.Linear):
    """As LibTorch's: a product and a sum where torch.nn's is one addmm."""

    def forward(self, x):
        y = x.matmul(self.weight.t())
        if self.bias is not None:
            y += self.bias
        return y


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = Linear(WIDTH, 3 * WIDTH)
        self.proj = Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(x).split(width, 2)
        q, k, v = (part.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = Linear(WIDTH, 4 * WIDTH)
        self.down = Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens)
        x = x + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def build(batch: int, seq: int):
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    targets = torch.zeros_like(tokens)

    def loss(logits):
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    return Gpt(), (tokens,), loss
