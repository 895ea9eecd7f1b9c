# SPDX-License-Identifier: Apache-2.0
"""The model of gpt.h in PyTorch: the same names, and the same operators in the same order."""

from __future__ import annotations

import dataclasses
import os
import pathlib

import torch
import torch.nn as nn
import torch.nn.functional as F

TEXT = pathlib.Path(os.environ.get("GPT_TEXT", pathlib.Path(__file__).resolve().parents[1] / "train_gpt" / "text.txt"))


@dataclasses.dataclass(frozen=True)
class Config:
    vocabulary: int = 65
    context: int = 32
    layers: int = 4
    heads: int = 4
    width: int = 64


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        split = self.qkv(x).view(batch, sequence, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, sequence, width))


class Mlp(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = Mlp(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """Token ids [batch, sequence] -> logits [batch, sequence, vocabulary]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.02)
            if name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean next-token cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def load_tokens(path: pathlib.Path = TEXT) -> tuple[torch.Tensor, int]:
    """The text as numbers of its bytes, in the order of their values, and how many different ones there are."""
    text = path.read_bytes()
    alphabet = sorted(set(text))
    index = {byte: i for i, byte in enumerate(alphabet)}
    return torch.tensor([index[byte] for byte in text]), len(alphabet)


def batch_of(tokens: torch.Tensor, context: int, step: int, row: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows` rows of the step's batch from `row` on: the same whatever number of ranks shares the batch."""
    length = len(tokens) - context - 1
    starts = [(7919 * step + 104729 * (row + i) + 31) % length for i in range(rows)]
    batch = torch.stack([tokens[start : start + context + 1] for start in starts])
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def traced() -> nn.Module:
    """The model as `shardplan trace gpt:traced` builds it."""
    return Gpt(Config(vocabulary=load_tokens()[1]))
