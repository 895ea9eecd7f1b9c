# SPDX-License-Identifier: Apache-2.0
"""Small random models: nested, branching, reused, tied, partly frozen, with outputs of several forms. Equal seeds give
equal models."""

from __future__ import annotations

import collections
import random
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

MODES = 3  # a forward is told one of these; branches choose by it


class Leaf(nn.Module):
    """Parameters of its own: a matrix, a norm, or a bare vector."""

    def __init__(self, kind: str, dim: int):
        super().__init__()
        self.kind = kind
        if kind == "vector":
            self.scale = nn.Parameter(torch.ones(dim))
        else:
            self.inner = nn.LayerNorm(dim) if kind == "norm" else nn.Linear(dim, dim, bias=kind == "biased")

    def forward(self, x, mode=0):
        return x * self.scale if self.kind == "vector" else torch.tanh(self.inner(x))


class Chain(nn.Module):
    """Parts one after the other, in an order of its own: some twice, some never."""

    def __init__(self, parts: list[nn.Module], order: list[int], scale: int = 0):
        super().__init__()
        self.parts, self.order = nn.ModuleList(parts), order
        if scale:
            self.scale = nn.Parameter(torch.ones(scale))

    def forward(self, x, mode=0):
        if hasattr(self, "scale"):
            x = x * self.scale
        for index in self.order:
            x = self.parts[index](x, mode=mode) if index % 2 else self.parts[index](x, mode)
        return x


class Fork(nn.Module):
    """Adds what some of its parts make of the same input: which ones the mode says. `dropped` runs, but nothing uses
    what it makes."""

    def __init__(self, parts: list[nn.Module], uses: list[list[int]], dropped: int):
        super().__init__()
        self.branches = nn.ModuleDict({f"b{i}": part for i, part in enumerate(parts)})
        self.uses, self.dropped = uses, dropped

    def forward(self, x, mode=0):
        y = x
        for index in self.uses[mode]:
            made = self.branches[f"b{index}"](x, mode)
            if index != self.dropped:
                y = y + made
        return y


class Twin(nn.Module):
    """Two outputs, of which its caller may use one."""

    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x, mode=0):
        y = self.first(x, mode)
        return y, self.second(y, mode)


class Join(nn.Module):
    """Runs a Twin and makes one tensor of its outputs."""

    def __init__(self, twin: Twin, use: str):
        super().__init__()
        self.twin, self.use = twin, use

    def forward(self, x, mode=0):
        y, z = self.twin(x, mode)
        return {"both": lambda: y + z, "first": lambda: y, "second": lambda: z}[self.use]()


class Apart(nn.Module):
    """A part whose inputs need no gradient, or that runs without gradients altogether; and one that the graph goes on
    through."""

    def __init__(self, aside: nn.Module, through: nn.Module, grad: bool):
        super().__init__()
        self.aside, self.through, self.grad = aside, through, grad

    def forward(self, x, mode=0):
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.grad):
            y = self.aside(x.detach(), mode)
        return self.through(x, mode) + y


class CrossBlock(nn.Module):
    """A decoder's block: reads the encoder's output, and returns the bias that it got, or else makes one, beside its
    own output."""

    def __init__(self, part: nn.Module, cross: nn.Module, dim: int, makes_bias: bool):
        super().__init__()
        self.part, self.cross = part, cross
        if makes_bias:
            self.bias = nn.Parameter(torch.ones(dim))

    def forward(self, x, memory, bias=None, mode=0):
        if bias is None:
            bias = self.bias * 2
        x = self.part(x + bias, mode)
        return x + self.cross(memory, mode), bias


class EncoderDecoder(nn.Module):
    """All blocks read the encoder's output, so its gradient is complete last; the bias of the first one passes through
    the others."""

    def __init__(self, encoder: nn.Module, blocks: list[CrossBlock], order: list[int]):
        super().__init__()
        self.encoder, self.blocks, self.order = encoder, nn.ModuleList(blocks), order

    def forward(self, x, mode=0):
        memory, bias = self.encoder(x, mode), None
        for index in self.order:
            x, bias = self.blocks[index](x, memory, bias, mode=mode)
        return x


class Recomputed(nn.Module):
    """A part in a checkpoint that the model calls itself."""

    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part

    def forward(self, x, mode=0):
        return checkpoint(self.part, x, mode, use_reentrant=False)


@dataclass
class Outputs:
    logits: torch.Tensor
    hidden: torch.Tensor


Pair = collections.namedtuple("Pair", "logits hidden")


class Root(nn.Module):
    """`embedding`: the input is token ids. Without embedding and head it has no parameters of its own."""

    def __init__(self, body: nn.Module, dim: int, embedding: bool, head: bool, output: str):
        super().__init__()
        if embedding:
            self.embedding = nn.Embedding(5, dim)
        self.body, self.output = body, output
        if head:
            self.head = nn.Linear(dim, 5, bias=False)

    def forward(self, x, mode=0):
        hidden = self.body(self.embedding(x) if hasattr(self, "embedding") else x, mode)
        logits = self.head(hidden) if hasattr(self, "head") else hidden
        return {
            "tensor": lambda: logits,
            "tuple": lambda: (logits, hidden),
            "dict": lambda: {"logits": logits, "extra": [hidden, 1]},
            "named": lambda: Pair(logits, hidden),
            "loss": lambda: (logits.float().sum(), logits),
        }[self.output]()


class ModelMaker:
    """Draws the structure when it is made; `build` makes modules of it, the same ones every time."""

    def __init__(self, seed: int):
        self._seed = seed
        self.dim = random.Random(seed).choice([2, 3, 4, 5, 6])
        self.takes_tokens = False

    def build(self) -> Root:
        rng = random.Random(self._seed)
        rng.random()
        depth = rng.choice([1, 2, 2, 3])
        body = self._chain(rng, depth, count=rng.randint(2, 4))
        self.takes_tokens = rng.random() < 0.4
        output = rng.choice(["tensor", "tensor", "tuple", "dict", "named", "loss"])
        root = Root(body, self.dim, self.takes_tokens, rng.random() < 0.5, output)
        self._tie(rng, root)
        self._freeze(rng, root)
        return root

    def _leaf(self, rng: random.Random) -> Leaf:
        return Leaf(rng.choice(["biased", "matrix", "norm", "vector"]), self.dim)

    def _chain(self, rng: random.Random, depth: int, count: int) -> Chain:
        parts = [self._node(rng, depth - 1) for _ in range(count)]
        order = list(range(count))
        if rng.random() < 0.25:
            order.insert(rng.randrange(count + 1), rng.randrange(count))
        if count > 2 and rng.random() < 0.15:
            order.remove(rng.choice(order))
        if rng.random() < 0.15:  # one module under two names
            parts[-1] = parts[0]
        return Chain(parts, order, self.dim if rng.random() < 0.3 else 0)

    def _node(self, rng: random.Random, depth: int) -> nn.Module:
        if depth <= 0:
            return self._leaf(rng)
        kind = rng.choice(["leaf", "chain", "chain", "fork", "twin", "apart", "encoder_decoder", "recomputed"])
        if kind == "chain":
            return self._chain(rng, depth, rng.randint(1, 3))
        if kind == "fork":
            parts = [self._node(rng, depth - 1) for _ in range(rng.randint(2, 3))]
            uses = [rng.sample(range(len(parts)), rng.randint(0, len(parts))) for _ in range(MODES)]
            return Fork(parts, uses, rng.choice([-1, -1, 0]))
        if kind == "twin":
            twin = Twin(self._node(rng, depth - 1), self._node(rng, depth - 1))
            return Join(twin, rng.choice(["both", "both", "first", "second"]))
        if kind == "encoder_decoder":
            return self._encoder_decoder(rng, depth)
        if kind == "recomputed":
            return Recomputed(self._node(rng, depth - 1))
        if kind == "apart":
            return Apart(self._node(rng, depth - 1), self._node(rng, depth - 1), rng.random() < 0.6)
        return self._leaf(rng)

    def _encoder_decoder(self, rng: random.Random, depth: int) -> EncoderDecoder:
        count = rng.randint(1, 3)
        blocks = [CrossBlock(self._node(rng, depth - 1), self._leaf(rng), self.dim, i == 0) for i in range(count)]
        order = [*range(count), *([rng.randrange(count)] if rng.random() < 0.2 else [])]
        return EncoderDecoder(self._node(rng, depth - 1), blocks, order)

    @staticmethod
    def _tie(rng: random.Random, root: Root) -> None:
        matrices = [
            module
            for module in root.modules()
            if isinstance(module, nn.Linear) and module.in_features == module.out_features
        ]
        if len(matrices) > 1 and rng.random() < 0.2:
            first, second = rng.sample(matrices, 2)
            second.weight = first.weight
        if hasattr(root, "embedding") and hasattr(root, "head") and rng.random() < 0.3:
            root.head.weight = root.embedding.weight

    @staticmethod
    def _freeze(rng: random.Random, root: Root) -> None:
        if rng.random() < 0.65:
            return
        parameters = list(root.parameters())
        if rng.random() < 0.5:  # one by one
            frozen = [p for p in parameters if rng.random() < 0.3]
        elif rng.random() < 0.5:  # whole modules
            frozen = [p for m in root.modules() if m is not root and rng.random() < 0.2 for p in m.parameters()]
        else:  # all but the end
            frozen = parameters[: rng.randrange(len(parameters))]
        for parameter in frozen:
            parameter.requires_grad_(False)


def recomputation_is_planned(module: nn.Module) -> bool:
    """Not where something in it may make a tensor that nothing uses, or saves its inputs and parameters alone
    (docs/internals/conformance.md), or is recomputed anyway."""
    return not any(
        isinstance(m, (Twin, Join, CrossBlock, Recomputed))
        or isinstance(m, Fork)
        and m.dropped >= 0
        or hasattr(m, "scale")
        for m in module.modules()
    )


def loss_of(output) -> torch.Tensor:
    """The loss of the first output, or of all that need a gradient."""
    if isinstance(output, Pair):
        return output.logits.float().sum()
    if isinstance(output, tuple) and output[0].dim() == 0:
        return output[0]
    leaves = torch.utils._pytree.tree_leaves(output)
    terms = [leaf.float().sum() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return sum(terms[1:], terms[0]) if terms else torch.zeros(())
