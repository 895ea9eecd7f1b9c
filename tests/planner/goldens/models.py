# SPDX-License-Identifier: Apache-2.0
"""The small models whose traces the golden plans are made from. `python models.py` records them anew into traces/."""

import pathlib

from shardplan import files
from shardplan.tracer import document, session  # before torch runs a backward
from shardplan.tracer.record import Call, Group

import torch
from torch import nn

TRACES = pathlib.Path(__file__).parent / "traces"


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Small(nn.Module):
    """A stem, three blocks, a head, and a parameter of the root. 5 rows of the head divide by no number of ranks above
    1."""

    def __init__(self, dim: int = 8):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.stem = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(3))
        self.head = nn.Linear(dim, 5)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x * self.scale)


class TwoParts(nn.Module):
    """Two models that are run one after the other, without a parameter in common."""

    def __init__(self, dim: int = 8):
        super().__init__()
        self.encoder = nn.Sequential(Block(dim), Block(dim))
        self.decoder = nn.Sequential(Block(dim), Block(dim))

    def forward(self, x):
        return self.decoder(self.encoder(x))


class Reused(Small):
    """Uses its first block a second time after the last."""

    def forward(self, x):
        x = self.stem(x)
        for layer in [*self.layers, self.layers[0]]:
            x = layer(x)
        return self.head(x * self.scale)


class Skipping(Small):
    """May leave out its second block."""

    def forward(self, x, skip=False):
        x = self.stem(x)
        for n, layer in enumerate(self.layers):
            if not (skip and n == 1):
                x = layer(x)
        return self.head(x * self.scale)


def tied() -> nn.Module:
    """The first and the last block share a weight."""
    model = Small()
    model.layers[2].up.weight = model.layers[0].up.weight
    return model


def frozen() -> nn.Module:
    """The first block needs no gradients, and in the second one layer needs none."""
    model = Small()
    model.layers[0].requires_grad_(False)
    model.layers[1].up.requires_grad_(False)
    return model


def frozen_prefix() -> nn.Module:
    model = Small()
    model.stem.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    return model


def record(module: nn.Module, inputs: int = 8) -> dict:
    """Forward 0: with gradients; 1: without. Backward 0: of one forward; 1: of two at once."""
    x, y, z = (torch.randn(4, inputs) for _ in range(3))
    groups = [
        Group([Call((x,), {})]),
        Group([Call((y,), {}, grad=False)], backward=False),
        Group([Call((x,), {}), Call((z,), {})]),
    ]
    return session.trace_groups(module, groups)


def record_skipping() -> dict:
    """Forward and backward 0: of all blocks; 1: without the second one."""
    x, y = (torch.randn(4, 8) for _ in range(2))
    return session.trace_groups(Skipping(), [Group([Call((x,), {})]), Group([Call((y,), {"skip": True})])])


def quantised(trace: dict) -> dict:
    """The trace as that of a model whose frozen parameters are kept in int8 (adapters on quantised weights)."""
    for parameter in trace["parameters"]:
        if not parameter.get("requires_grad", True):
            parameter["dtype"] = "int8"
    return trace


def wider_gradients(trace: dict) -> dict:
    """The trace as that of a model in bfloat16 whose gradients are to be in float32."""
    for parameter in trace["parameters"]:
        parameter.update(dtype="bfloat16", grad_dtype="float32")
    return trace


def tensor_parallel(trace: dict, size: int) -> dict:
    """The trace as one of `size` ranks records it when the blocks are cut column-wise (up), then row-wise (down):
    shapes of parameters are what the rank has; activations and operators are left as they are."""

    def cut(parameter: dict, dim: int):
        parameter["shape"][dim] //= size
        parameter["placements"] = [{"mesh_dim": "tensor", "size": size, "dim": dim}]

    for parameter in trace["parameters"]:
        if not parameter["fqn"].startswith("layers."):
            continue
        if parameter["fqn"].endswith("down.bias"):
            parameter["placements"] = [{"mesh_dim": "tensor", "size": size}]
        else:
            cut(parameter, 1 if parameter["fqn"].endswith("down.weight") else 0)
    return trace


def traces() -> dict[str, dict]:
    return {
        "small": record(Small()),
        "tied": record(tied()),
        "frozen": record(frozen()),
        "frozen_prefix": record(frozen_prefix()),
        "quantised": quantised(record(frozen())),
        "reused": record(Reused()),
        "two_parts": record(TwoParts()),
        "skipping": record_skipping(),
        "wider_gradients": wider_gradients(record(Small())),
        "tensor_parallel": tensor_parallel(record(Small()), 2),
    }


def main() -> None:
    TRACES.mkdir(exist_ok=True)
    for name, trace in traces().items():
        trace["model"] = name
        files.write_text(TRACES / f"{name}.json", "".join(document.lines(trace)))


if __name__ == "__main__":
    main()
