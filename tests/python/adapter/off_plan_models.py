# SPDX-License-Identifier: Apache-2.0
"""Models of off_plan.py besides those of equivalence_models.py. `python off_plan_models.py CASES.pickle FOLDER` makes a
plan for every case of both, and goes on where one cannot be made: that is an answer, too."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import pickle
import sys

import torch
import torch.nn as nn
import torch.utils._pytree as pytree
from equivalence_models import BATCH, BLOCKS, MODELS, Layer, Mlp, Model, floats
from torch.utils.checkpoint import checkpoint

# ---- what blocks may hand to each other ----


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    scale: float = 1.0


Named = collections.namedtuple("Named", ["x", "scale"])


class Custom:
    """A container that pytree is told of."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Opaque(Custom):
    """One that it is not told of."""


pytree.register_pytree_node(Custom, lambda c: ([c.x], None), lambda leaves, _: Custom(*leaves))

PACK = {
    "record": lambda x: Record(x, 2.0),
    "named": lambda x: Named(x, 2.0),
    "nested": lambda x: {"a": [1, {"b": (x, "text")}], "c": None},
    "ordered": lambda x: collections.OrderedDict(x=x),
    "custom": Custom,
    "opaque": Opaque,
    "record_in_list": lambda x: [Record(x), 3],
}
UNPACK = {
    "nested": lambda packed: packed["a"][1]["b"][0],
    "ordered": lambda packed: packed["x"],
    "record_in_list": lambda packed: packed[0].x,
}


class PackedLayer(Layer):
    def __init__(self, width: int, hidden: int, kind: str, widens: bool) -> None:
        super().__init__(width, hidden)
        self.kind, self.widens = kind, widens

    def forward(self, packed):
        x = UNPACK.get(self.kind, lambda packed: packed.x)(packed)
        y = super().forward(x)
        return PACK[self.kind](y.float() if self.widens else y)


class Packed(nn.Module):
    """Blocks that hand each other something else than a tensor. widens: of float32, whatever they compute in. returns:
    the model does, too."""

    def __init__(
        self, kind: str, width: int = 10, hidden: int = 13, widens: bool = False, returns: bool = False
    ) -> None:
        super().__init__()
        self.kind, self.widens, self.returns = kind, widens, returns
        self.stem = nn.Linear(7, width)
        self.layers = nn.ModuleList(PackedLayer(width, hidden, kind, widens) for _ in range(3))
        self.head = nn.Linear(width, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = PACK[self.kind](self.stem(x))
        for layer in self.layers:
            packed = layer(packed)
        x = UNPACK.get(self.kind, lambda packed: packed.x)(packed)
        y = self.head(x.to(self.head.weight.dtype) if self.widens else x)
        return PACK[self.kind](y) if self.returns else y


class Checkpointed(Mlp):
    """Some blocks are recomputed, by torch.utils.checkpoint in the model itself."""

    def __init__(self, reentrant: bool, recomputed: tuple[int, ...] = (0, 2), **arguments) -> None:
        super().__init__(**arguments)
        self.reentrant, self.which = reentrant, recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x) * self.scale
        for index, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if index in self.which else layer(x)
        return self.head(x)


class RecomputingLayer(Layer):
    def __init__(self, width: int, hidden: int, reentrant: bool) -> None:
        super().__init__(width, hidden)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(lambda x: self.down(self.up(x).tanh()), self.norm(x), use_reentrant=self.reentrant)


class Recomputing(nn.Module):
    """Blocks that recompute a part of themselves."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 10)
        self.layers = nn.ModuleList(RecomputingLayer(10, 13, reentrant) for _ in range(3))
        self.head = nn.Linear(10, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MODELS |= {
    "packed": Model(Packed, floats(BATCH, 7)),
    "checkpointed": Model(Checkpointed, floats(BATCH, 7)),
    "recomputing": Model(Recomputing, floats(BATCH, 7)),
}
BLOCKS |= {name: "layers.*" for name in ("packed", "checkpointed", "recomputing")}


def main(cases_file: str, folder_name: str) -> None:
    import equivalence_plans
    from shardplan.tracer import document

    folder = pathlib.Path(folder_name)
    traces: dict[str, pathlib.Path] = {}
    made: dict[str, dict[str, str]] = {}
    for case in pickle.loads(pathlib.Path(cases_file).read_bytes()):
        key = equivalence_plans.trace_key(case)
        try:
            if key not in traces:
                path = folder / f"{case.model}{len(traces)}.trace.json"
                with open(path, "w", encoding="utf-8") as file:
                    document.write(equivalence_plans.trace(case), file)
                traces[key] = path
            made[case.name] = {"plan": equivalence_plans.plan(case, traces[key], folder)}
        except Exception as error:
            made[case.name] = {"refused": f"{type(error).__name__}: {error}"}
    (folder / "plans.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main(*sys.argv[1:])
