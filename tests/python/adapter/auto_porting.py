# SPDX-License-Identifier: Apache-2.0
"""Scripts as torchtitan has them, next to real FSDP2: parameters on the meta device that are filled behind auto, ties that this makes, and parameters on
FSDP's own mesh. What test_auto_features.py runs on the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from adapter_workers import DEVICE
from equivalence import largest_difference, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardplan.torch as sp


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 6)  # 5 rows are not cut evenly

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(torch.relu(self.up(x))))


class Decoder(nn.Module):
    """ties: is the embedding the head's, once the states are initialized?"""

    def __init__(self, ties: bool = False) -> None:
        super().__init__()
        self.embedding, self.layers, self.head = nn.Embedding(16, 6), nn.ModuleList(Block() for _ in range(3)), nn.Linear(6, 16, bias=False)
        self.register_buffer("scale", torch.ones(6), persistent=False)
        self.ties = ties

    def init_states(self) -> None:
        if self.ties:
            self.embedding.weight = self.head.weight
        torch.manual_seed(5)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.3)
            if isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        self.scale.fill_(0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _trained(model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    seen = {}
    for step in range(3):
        tokens = torch.randint(0, 16, (3, 4), generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(DEVICE)
        loss = model(tokens).square().mean()
        loss.backward()
        seen[f"loss {step}"] = loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    return seen | {name: whole(parameter) for name, parameter in model.named_parameters()}


def _both(on_meta: bool, ties: bool, after: Callable[[nn.Module], None] = lambda model: None) -> tuple[float, str]:
    def built(shard: Callable, root: Callable) -> nn.Module:
        with torch.device("meta" if on_meta else DEVICE):
            model = Decoder(ties)
        for layer in model.layers:
            shard(layer)
        root(model)
        after(model)
        if on_meta:
            model.to_empty(device=DEVICE)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.init_states()
        return model

    ours = built(sp.unit, lambda model: sp.auto(model, initialize=lambda module: None, quiet=True, plans=None))
    return largest_difference(_trained(ours), _trained(built(fully_shard, fully_shard)))


def initialized_behind_auto() -> tuple[float, str]:
    return _both(on_meta=True, ties=False)


def initialized_behind_setters() -> tuple[float, str]:
    """The first step follows another plan than auto's: it has the values, too."""
    return _both(True, False, lambda model: model.layers[0].set_modules_to_forward_prefetch([model.layers[1]]))


def ties_made_behind_auto() -> str:
    """One reduction of the sum in place of the sum of two: as exact as float32 is."""
    for on_meta in (True, False):
        difference, where = _both(on_meta, True)
        if difference > 1e-6:
            return f"{where}: {difference}"
    return ""


def meta_without_initialization() -> str:
    with torch.device("meta"):
        model = Decoder()
    model.register_parameter("own", nn.Parameter(torch.empty(4, device="meta")))
    try:
        sp.auto(model, quiet=True, plans=None)
    except sp.PlanError as error:
        missing = [word for word in ("auto", "to_empty()", "initialize=lambda module: None") if word not in str(error)]
        return f"{error} without {missing}" if missing else ""
    return "no error"


def dp_mesh_dims_of_units() -> tuple[float, str]:
    """As torchtitan's full_dtensor has it: parameters are DTensors on the whole mesh, and each call names FSDP's dimensions."""
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("dp_shard", "tp"))
    arguments = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="dp_shard")}

    def built(shard: Callable, root: Callable) -> nn.Module:
        torch.manual_seed(2)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))).to(DEVICE)
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate(), Replicate()])))
        for layer in model:
            shard(layer, **arguments)
        shard(model, **arguments)
        root(model)
        return model

    def trained(model: nn.Module) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = {}
        for step in range(2):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(DEVICE)
            loss = model(DTensor.from_local(x, mesh, [Shard(0), Replicate()])).square().mean()
            loss.redistribute(placements=[Replicate(), Replicate()]).backward()
            seen |= {f"{name}.grad {step}": whole(parameter.grad) for name, parameter in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        placed = [parameter.placements for parameter in model.parameters()]
        assert all(one == (Shard(0), Replicate()) for one in placed), placed
        return seen | {name: whole(parameter) for name, parameter in model.named_parameters()}

    ours = built(sp.unit, lambda model: sp.auto(model, quiet=True, plans=None))
    return largest_difference(trained(ours), trained(built(fully_shard, lambda model: None)))


PORTING = [
    initialized_behind_auto, initialized_behind_setters, ties_made_behind_auto, meta_without_initialization, dp_mesh_dims_of_units,
]  # fmt: skip
