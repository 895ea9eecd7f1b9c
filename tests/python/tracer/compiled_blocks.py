# SPDX-License-Identifier: Apache-2.0
"""Blocks that test_tracer_compiled.py compiles, and a model of equal ones."""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from tracer_models import DIM, FFN, HEADS, Block, SwiGLU

BATCH, SEQ = 2, 32


class Gelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down, self.dropout = (
            nn.LayerNorm(DIM), nn.Linear(DIM, FFN), nn.Linear(FFN, DIM), nn.Dropout(0.1),
        )

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(DIM), SwiGLU()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Attention(nn.Module):
    """One product for queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Softmax(nn.Module):
    """Attention by products."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))

    def forward(self, x):
        weights = torch.softmax(
            self.q(x) @ self.k(x).transpose(1, 2) / DIM**0.5
            + torch.ones(SEQ, SEQ, device=x.device, dtype=x.dtype).triu(1),
            -1,
        )
        return torch.tanh(weights @ self.v(x))


class Decoder(nn.Module):
    """A Llama block that makes its own rotary tables."""

    def __init__(self):
        super().__init__()
        self.block = Block(HEADS, nn.RMSNorm)

    def forward(self, x):
        angles = torch.arange(SEQ, device=x.device, dtype=x.dtype)[:, None] * torch.ones(
            DIM // HEADS, device=x.device, dtype=x.dtype
        )
        return self.block(x, angles.cos(), angles.sin())


def _keep_products(_context, operator, *_arguments, **_options):
    return CheckpointPolicy.MUST_SAVE if operator is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


BLOCKS = {
    "gelu": Gelu,
    "gated": Gated,
    "attention": Attention,
    "softmax": Softmax,
    "decoder": Decoder,
    "checkpointed decoder": lambda: checkpoint_wrapper(Decoder()),
    "checkpointed gelu": lambda: checkpoint_wrapper(Gelu()),
    "selectively checkpointed gated": lambda: checkpoint_wrapper(
        Gated(), context_fn=functools.partial(create_selective_checkpoint_contexts, _keep_products)
    ),
}


class Stack(nn.Module):
    """Equal blocks between two layers that are not compiled."""

    def __init__(self, make, layers=3):
        super().__init__()
        self.first, self.layers, self.last = (
            nn.Linear(DIM, DIM),
            nn.ModuleList(make() for _ in range(layers)),
            nn.Linear(DIM, DIM),
        )

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)
