# SPDX-License-Identifier: Apache-2.0
"""The twins in Python of tests/executor/gpt_model.h and trace_models.cc: modules, names and statements are the same."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, CONTEXT, WIDTH, HEADS, BLOCKS = 65, 64, 96, 4, 4


class Linear(nn.Linear):
    """LibTorch's Linear: a product and a sum for more than two dimensions, where torch.nn's is one addmm."""

    def forward(self, x):
        if x.dim() == 2 and self.bias is not None:
            return torch.addmm(self.bias, x, self.weight.t())
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


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = Linear(8, 8)
        self.again = self.linear
        self.last = Linear(8, 8)

    def forward(self, x):
        x = self.linear(x)
        x = F.relu(x)
        x = self.again(x)
        return self.last(x)


class TiedHead(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.weight = table

    def forward(self, x):
        return x.matmul(self.weight.t())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(16, 8)
        self.head = TiedHead(self.wte.weight)

    def forward(self, tokens):
        x = self.wte(tokens)
        return self.head(x)


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = Linear(8, 8)

    def forward(self, x):
        x.add_(1)
        return self.linear.forward(x)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Linear(8, 8)
        self.shift = Shift()
        self.last = Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        x.mul_(0.5)
        x.view(-1, 2, 4).add_(1)
        x = self.shift(x)
        x = x.clone()
        x.select(1, 0).zero_()
        x = self.last(x)
        return x.relu_()


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = Linear(8, 8)
        self.right = Linear(8, 8)

    def forward(self, x):
        y = self.left(x)
        return y * self.right(x)


class TwiceInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Linear(8, 8)
        self.twice = Twice()

    def forward(self, x):
        x = self.first(x)
        y = self.twice(x)
        return x + y


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Linear(8, 8)
        self.side = Linear(8, 8)
        self.last = Linear(8, 8)
        self.unused = Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        weights = self.side(x).detach()
        x = self.last(x)
        return x * weights


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Linear(8, 8).requires_grad_(False)
        self.middle = Linear(8, 8)
        self.last = Linear(8, 8)
        self.last.weight.requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        x = self.middle(x)
        return self.last(x)


class Indexed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Linear(8, 8)
        self.register_buffer("scale", torch.zeros(8))

    def forward(self, x, index):
        x = self.first(x)
        x = x * self.scale
        rows = x[index]
        picked = torch.gather(rows, 1, index.view(-1, 1))
        largest = torch.topk(rows, 2, 1)[0]
        return picked * largest


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = Linear(4 * 8 * 8, 5)

    def forward(self, x):
        x = self.conv(x)
        x = F.relu(x)
        x = F.max_pool2d(x, 2)
        x = self.up(x)
        return self.last(x.flatten(1))


class FirstOfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = Linear(8, 8)

    def forward(self, x, _not_used):
        return self.linear.forward(x)


class UnusedInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Linear(8, 8)
        self.second = Linear(8, 8)
        self.pick = FirstOfTwo()

    def forward(self, x):
        a = self.first(x)
        b = self.second(x)
        return self.pick(a, b)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        x = self.linear(x)
        return self.dropout(x)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = Linear(16, 16)
        self.register_buffer("mask", torch.zeros(4, 4).to(torch.bool))

    def forward(self, x):
        y = self.linear(x)
        heads = y.view(2, 4, 2, 8).transpose(1, 2)
        one = heads.narrow(1, 0, 1)
        masked = F.scaled_dot_product_attention(heads, heads, heads, self.mask)
        shared = F.scaled_dot_product_attention(heads, one, one, enable_gqa=True)
        return masked + shared


def gpt():
    """(module, inputs, loss), as the tracer wants it."""
    tokens = torch.zeros(2, CONTEXT, dtype=torch.long)
    targets = torch.zeros_like(tokens)

    def loss(logits):
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    return Gpt(), (tokens,), loss


def tied():
    return Tied(), (torch.zeros(2, 4, dtype=torch.long),), torch.sum


def indexed():
    return Indexed(), (torch.zeros(4, 8), torch.zeros(5, dtype=torch.long)), torch.sum


def masked():
    return Masked(), (torch.zeros(2, 4, 16),), torch.sum


def convolutional():
    return Convolutional(), (torch.zeros(2, 3, 8, 8),), torch.sum


def _of(kind):
    return lambda: (kind(), (torch.zeros(4, 8),), torch.sum)


reused, in_place, twice_inside, detached = _of(Reused), _of(InPlace), _of(TwiceInside), _of(Detached)
frozen, unused_input, dropping = _of(Frozen), _of(UnusedInput), _of(Dropping)
