# SPDX-License-Identifier: Apache-2.0
"""A small GPT: what the example trains and what the adapter's tests compare with real FSDP2.

Its shapes are deliberately awkward. The vocabulary and most first dimensions do not divide by 2 or 3, the head is tied
to the token embedding, and LayerNorm and biases give the units small one-dimensional parameters.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclasses.dataclass(frozen=True)
class GptConfig:
    vocabulary: int = 97
    context: int = 32
    layers: int = 3
    heads: int = 4
    width: int = 44
    tied: bool = True


class Attention(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        q, k, v = self.qkv(x).view(batch, sequence, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, sequence, width))


class Block(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width + 1)
        self.down = nn.Linear(4 * config.width + 1, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Token ids [batch, sequence] -> logits [batch, sequence, vocabulary]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._init)
        if config.tied:
            self.head.weight = self.tokens.weight

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross entropy, in float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
