# SPDX-License-Identifier: Apache-2.0
"""Scripts as torchtitan has them, next to real FSDP2: parameters on the meta device that are filled behind auto, ties
that this makes, and parameters on FSDP's own mesh. test_auto_features.py runs them on the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from adapter_workers import DEVICE
from equivalence import largest_difference, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
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
        self.embedding, self.layers, self.head = (
            nn.Embedding(16, 6),
            nn.ModuleList(Block() for _ in range(3)),
            nn.Linear(6, 16, bias=False),
        )
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
        tokens = torch.randint(0, 16, (3, 4), generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(
            DEVICE
        )
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


# ---- ties across units ----


class Tied(nn.Module):
    """A model whose embedding, head and `again`, each a unit, become one parameter by `tie`, behind the units."""

    def __init__(self, rows: int = 16) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.layer, self.again, self.head = (
            nn.Embedding(rows, 6), Block(), nn.Embedding(rows, 6), nn.Linear(6, rows, bias=False),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(tokens)) + self.again(tokens).relu())


def _two(model: Tied) -> None:
    model.embedding.weight = model.head.weight


def _first_unit_owns(model: Tied) -> None:
    model.head.weight = model.embedding.weight


def _three(model: Tied) -> None:
    model.embedding.weight = model.again.weight = model.head.weight


def _another(model: Tied) -> None:
    """A parameter that was nobody's."""
    with torch.no_grad():
        made = nn.Parameter(model.head.weight.detach() + 0.25)
    model.embedding.weight = model.head.weight = made


def _separate(shard: Callable, model: Tied) -> None:
    for module in (model.embedding, model.layer, model.again, model.head):
        shard(module)


def _embeddings_with_root(shard: Callable, model: Tied) -> None:
    for module in (model.layer, model.head):
        shard(module)


def _plain(model: nn.Module, backward: Callable[[], None], micro_batch: int) -> None:
    backward()


def _synced_last(model: nn.Module, backward: Callable[[], None], micro_batch: int) -> None:
    model.set_requires_gradient_sync(micro_batch == 1)
    backward()


def _tied_training(model: Tied, accumulate: int, around: Callable, clip: bool) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = {"parameters": torch.tensor(len(list(model.parameters())))}
    for step in range(3):
        for micro_batch in range(accumulate):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + dist.get_rank())
            tokens = torch.randint(0, model.head.weight.shape[0], (3, 4), generator=generator).to(DEVICE)

            def backward() -> None:
                loss = model(tokens).float().square().mean()
                loss.backward()
                seen[f"loss {step} {micro_batch}"] = loss.detach()

            around(model, backward, micro_batch)
        if clip:
            seen[f"norm {step}"] = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        seen |= {f"{name}.grad {step}": whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return seen | {name: whole(value) for name, value in model.state_dict().items()}


def _tied_both(
    tie=_two,
    units=_separate,
    accumulate=1,
    around=_plain,
    clip=False,
    before=lambda model: None,
    mesh=None,
    rows=16,
    **arguments,
):
    def built(shard: Callable, root: Callable) -> Tied:
        model = Tied(rows).to(DEVICE)
        before(model)
        units(lambda module: shard(module, **arguments), model)
        root(model)
        tie(model)
        return model

    of_mesh = {} if mesh is None else {"mesh": mesh}
    ours = built(sp.unit, lambda model: sp.auto(model, quiet=True, plans=None, **of_mesh, **arguments))
    real = built(
        lambda module, **more: fully_shard(module, **of_mesh, **more),
        lambda model: fully_shard(model, **of_mesh, **arguments),
    )
    return largest_difference(
        _tied_training(ours, accumulate, around, clip), _tied_training(real, accumulate, around, clip)
    )


def tied_across_units() -> tuple[float, str]:
    return _tied_both()


def tied_across_units_first_owns() -> tuple[float, str]:
    return _tied_both(_first_unit_owns, clip=True)


def tied_across_three_units() -> tuple[float, str]:
    return _tied_both(_three, accumulate=2)


def tied_to_another() -> tuple[float, str]:
    return _tied_both(_another)


def tied_with_the_root() -> tuple[float, str]:
    """Two names of the root's unit, and one of another."""
    difference, where = _tied_both(_three, _embeddings_with_root, accumulate=2)
    # The root's own tie is one parameter of the plan, reduced once.
    return (0.0, "") if difference < 1e-6 else (difference, where)


def tied_with_the_root_alone() -> tuple[float, str]:
    return _tied_both(_two, _embeddings_with_root)


def tied_and_accumulated() -> tuple[float, str]:
    return _tied_both(accumulate=3)


def tied_and_synced_last() -> tuple[float, str]:
    return _tied_both(_three, accumulate=2, around=_synced_last)


def tied_in_low_precision() -> tuple[float, str]:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return _tied_both(_three, accumulate=2, clip=True, mp_policy=policy)


def tied_in_low_precision_throughout() -> tuple[float, str]:
    return _tied_both(_two, accumulate=2, mp_policy=MixedPrecisionPolicy(torch.bfloat16))


def tied_and_kept_gathered() -> tuple[float, str]:
    return _tied_both(_two, reshard_after_forward=False)


def tied_with_a_frozen_one() -> tuple[float, str]:
    """The shard trains: so both units reduce."""
    return _tied_both(_two, before=lambda model: model.embedding.requires_grad_(False))


def tied_to_a_frozen_one() -> tuple[float, str]:
    return _tied_both(_first_unit_owns, before=lambda model: model.embedding.requires_grad_(False))


def tied_on_replicas() -> tuple[float, str]:
    return _tied_both(_three, mesh=init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("replicate", "shard")))


def not_tied_and_synced_last() -> tuple[float, str]:
    return _tied_both(lambda model: None, accumulate=2, around=_synced_last)


def tied_with_fewer_rows_than_ranks() -> tuple[float, str]:
    """The second rank has none of the one row, and so nothing that could be out of date."""
    return _tied_both(_two, rows=1)


def tied_units_evaluate() -> tuple[float, str]:
    """The first forward is an evaluation, and an evaluation is between steps."""

    def trained(model: Tied) -> dict[str, torch.Tensor]:
        tokens = torch.arange(12, device=DEVICE).view(3, 4)
        with torch.no_grad():
            seen = {"first": model.eval()(tokens)}
        seen |= _tied_training(model.train(), 1, _plain, False)
        with torch.no_grad():
            return seen | {"last": model.eval()(tokens)}

    def built(shard: Callable, root: Callable) -> Tied:
        model = Tied().to(DEVICE)
        _separate(shard, model)
        root(model)
        _two(model)
        return model

    ours = built(sp.unit, lambda model: sp.auto(model, quiet=True, plans=None))
    return largest_difference(trained(ours), trained(built(fully_shard, fully_shard)))


def a_tie_outlives_the_plan() -> str:
    model = Tied().to(DEVICE)
    _separate(sp.unit, model)
    sp.auto(model, quiet=True, plans=None)
    _three(model)
    trained = _tied_training(model, 1, _plain, False)
    sp.remove(model)
    if not model.embedding.weight is model.head.weight is model.again.weight:
        return "untied by remove"
    return "" if torch.equal(model.head.weight, trained["head.weight"]) else "other values"


def _rows_apart(model: Tied) -> list[int]:
    """Rows that the embedding is gathered with and the head is not, after a step."""
    held = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        held.clear()
        hooks = [
            module.register_forward_pre_hook(lambda module, _: held.append(module.weight.detach().clone()))
            for module in (model.embedding, model.head)
        ]
        model(torch.arange(17, device=DEVICE).view(1, 17)).square().mean().backward()
        for hook in hooks:
            hook.remove()
        optimizer.step()
        optimizer.zero_grad()
    return (held[0] != held[1]).any(1).nonzero().flatten().tolist()


def uneven_ties_are_refused() -> str:
    """FSDP2 pads the piece of the last rank for each unit by itself: the optimizer steps one of the two."""
    real, ours = Tied(17).to(DEVICE), Tied(17).to(DEVICE)
    _separate(fully_shard, real)
    fully_shard(real)
    _two(real)
    if _rows_apart(real) != list(range(9, 17)):
        return "FSDP2 has both units' values the same: no reason to refuse"
    _separate(sp.unit, ours)
    sp.auto(ours, quiet=True, plans=None)
    _two(ours)
    try:
        ours(torch.arange(17, device=DEVICE).view(1, 17))
    except sp.PlanError as error:
        missing = [
            word
            for word in ("embedding.weight", "head.weight", "17 rows", "2 ranks", "one unit")
            if word not in str(error)
        ]
        return f"{error} without {missing}" if missing else ""
    return "no error"


def ties_of_different_shapes_are_refused() -> str:
    model = Tied().to(DEVICE)
    model.embedding = nn.Embedding(18, 6, device=DEVICE)
    _separate(sp.unit, model)
    sp.auto(model, quiet=True, plans=None)
    _two(model)
    try:
        model(torch.zeros(1, 2, dtype=torch.long, device=DEVICE))
    except sp.PlanError as error:
        return "" if "shape: [18, 6] and [16, 6]" in str(error) else str(error)
    return "no error"


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
    """Parameters are DTensors on the whole mesh, and each call names FSDP's dimensions, as with torchtitan's
    full_dtensor."""
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("dp_shard", "tp"))
    arguments = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="dp_shard")}

    def built(shard: Callable, root: Callable) -> nn.Module:
        torch.manual_seed(2)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))).to(DEVICE)
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                module.register_parameter(
                    name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate(), Replicate()]))
                )
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
    initialized_behind_auto,
    initialized_behind_setters,
    ties_made_behind_auto,
    meta_without_initialization,
    dp_mesh_dims_of_units,
    tied_across_units,
    tied_across_units_first_owns,
    tied_across_three_units,
    tied_to_another,
    tied_with_the_root,
    tied_with_the_root_alone,
    tied_and_accumulated,
    tied_and_synced_last,
    not_tied_and_synced_last,
    tied_in_low_precision,
    tied_in_low_precision_throughout,
    tied_and_kept_gathered,
    tied_with_a_frozen_one,
    tied_to_a_frozen_one,
    tied_on_replicas,
    tied_with_fewer_rows_than_ranks,
    tied_units_evaluate,
    a_tie_outlives_the_plan,
    uneven_ties_are_refused,
    ties_of_different_shapes_are_refused,
]
