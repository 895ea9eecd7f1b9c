# SPDX-License-Identifier: Apache-2.0
"""Small models that the tracer's tests record. Each builder takes no argument or batch and seq, as SOURCE callables
do."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

DIM, FFN, HEADS, KV_HEADS, VOCAB = 64, 160, 8, 2, 96


class MLP(nn.Module):
    def __init__(self, dim: int = 16, hidden: int = 48):
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, kv_heads: int):
        super().__init__()
        self.head_dim, self.kv_heads = DIM // HEADS, kv_heads
        self.q = nn.Linear(DIM, DIM, bias=False)
        self.k = nn.Linear(DIM, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(DIM, kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x, cos, sin):
        batch, seq, _ = x.shape

        def heads(t, count):
            return t.view(batch, seq, count, self.head_dim).transpose(1, 2)

        def rotate(t):
            a, b = t.chunk(2, dim=-1)
            return t * cos + torch.cat((-b, a), dim=-1) * sin

        q, k, v = heads(self.q(x), HEADS), heads(self.k(x), self.kv_heads), heads(self.v(x), self.kv_heads)
        out = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=self.kv_heads != HEADS)
        return self.o(out.transpose(1, 2).reshape(batch, seq, DIM))


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(DIM, FFN, bias=False),
            nn.Linear(FFN, DIM, bias=False),
            nn.Linear(DIM, FFN, bias=False),
        )

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, kv_heads: int, norm: type):
        super().__init__()
        self.norm1, self.attention = norm(DIM), Attention(kv_heads)
        self.norm2, self.mlp = norm(DIM), SwiGLU()

    def forward(self, x, cos, sin):
        h = x + self.attention(self.norm1(x), cos, sin)
        return h + self.mlp(self.norm2(h))


class Llama(nn.Module):
    """A decoder with grouped key/value heads, rotary tables as buffers, and possibly tied embeddings or checkpointed
    blocks."""

    def __init__(
        self,
        layers: int = 3,
        seq: int = 32,
        kv_heads: int = KV_HEADS,
        tied: bool = False,
        checkpointed: bool = False,
        norm: type = nn.RMSNorm,
    ):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block(kv_heads, norm) for _ in range(layers))
        self.norm, self.head = norm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.checkpointed = checkpointed
        self.register_buffer("cos", torch.ones(seq, DIM // HEADS), persistent=False)
        self.register_buffer("sin", torch.ones(seq, DIM // HEADS))

    def forward(self, tokens):
        x = self.embed(tokens)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x = layer(x, cos, sin)
        return self.head(self.norm(x))


class Reused(nn.Module):
    """One layer called three times; the same module also registered under a second name."""

    def __init__(self):
        super().__init__()
        self.first, self.shared = nn.Linear(8, 8), nn.Linear(8, 8)
        self.alias = self.shared

    def forward(self, x):
        x = torch.tanh(self.shared(self.first(x)))
        return self.alias(torch.tanh(self.shared(x)))


class Frozen(nn.Module):
    """A backbone without gradients in the middle of trained layers, and one frozen from the start."""

    def __init__(self):
        super().__init__()
        self.stem, self.before, self.middle, self.after = (nn.Linear(8, 8) for _ in range(4))
        self.stem.requires_grad_(False)
        self.middle.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            x = self.stem(x)
        return self.after(torch.relu(self.middle(torch.relu(self.before(x)))))


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 6)

    def forward(self, x, *, scale):
        return {"left": self.left(x) * scale, "extra": (torch.ones(2, device=x.device), self.right(x))}


class Branchy(nn.Module):
    """Keyword arguments, several outputs, a branch used twice, an unused parameter."""

    def __init__(self):
        super().__init__()
        self.a, self.split, self.join, self.unused = nn.Linear(8, 8), TwoOutputs(), nn.Linear(10, 8), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = torch.sigmoid(self.a(x))
        out = self.split(y, scale=self.scale)
        joined = self.join(torch.cat((out["left"], out["extra"][1]), -1))
        return joined + y * out["extra"][0].sum()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.q(x) * self.k(x)


class TwiceInside(nn.Module):
    """A module uses its input twice, its caller uses it once more: attention with the residual outside, as in BERT."""

    def __init__(self):
        super().__init__()
        self.a, self.pair = nn.Linear(8, 8), nn.Sequential(Pair())

    def forward(self, x):
        h = self.a(x)
        return self.pair(h) + h


class InPlace(nn.Module):
    """Changes a module's input in place."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.rest = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))

    def forward(self, x):
        return self.rest(self.first(x))


class Indexed(nn.Module):
    """A value used three times, and gathers: what a backward does in place on real tensors."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, index):
        h = self.a(x)
        return (torch.tanh(self.b(h)) + torch.sin(self.c(h)) + h)[index]


def tokens_loss(tokens):
    return lambda logits: F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def small_llama(batch, seq):
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    return Llama(seq=seq), (tokens,), tokens_loss(tokens)


def only_a_module():
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 4))


def not_a_module():
    return [1, 2]


def fails_to_build():
    raise KeyError("no such size")


class Failing(nn.Module):
    def forward(self, x):
        raise ValueError("heads do not divide the width")


class ReadsValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
        return x if x.sum() > 0 else -x


def failing():
    return Failing(), (torch.zeros(2, 2),)


def reads_values():
    return ReadsValues(), (torch.zeros(2, 4),)


class ReadsInConstructor(nn.Module):
    def __init__(self):
        super().__init__()
        self.rates = [x.item() for x in torch.linspace(0, 1, 3)]
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * self.rates[1]


def reads_in_constructor():
    return ReadsInConstructor(), (torch.zeros(2, 4),)


def recurrent():
    return nn.LSTM(4, 4), (torch.zeros(3, 2, 4),)


def no_gradient():
    return nn.Linear(4, 4).requires_grad_(False), (torch.zeros(2, 4),)


def two_losses():
    return nn.Linear(4, 4), (torch.zeros(2, 4),), lambda output: output


a_number = 3
