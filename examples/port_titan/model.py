# SPDX-License-Identifier: Apache-2.0
"""A decoder as torchtitan lays its models out: embeddings, a dict of blocks, a norm and an output layer."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = (w(x).view(batch, length, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, dim)
        )


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(dim, heads), FeedForward(dim, 2 * dim)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = 97, dim: int = 32, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleDict({str(number): TransformerBlock(dim, heads) for number in range(layers)})
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))
