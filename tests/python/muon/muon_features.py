# SPDX-License-Identifier: Apache-2.0
"""Parts of a training with sp.Muon, on a rank: groups and schedulers, closures, states, ties, other optimizers next to
it. A function returns "" or what is wrong."""

from __future__ import annotations

import copy
import pathlib
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from muon_models import (
    DEVICE, Matrices, difference, gradient, in_one_process, make_mesh, set_gradients, sharded, whole,
)
from muon_plans import document, written
from muon_ranks import EXPERTS, LAYER, UNEVEN, units
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

UNITS = units(LAYER, {**UNEVEN, **EXPERTS}, LAYER)
FLOAT = torch.float32


def made(ranks: int, own_units=UNITS, **arguments):
    """A model that fully_shard has sharded, and its Muon."""
    import shardplan.torch as sp

    model = sharded(own_units, FLOAT, make_mesh(1, ranks))
    return model, sp.Muon(model, plan=written(document(own_units, ranks), ranks), **arguments)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()


def groups_and_scheduler(ranks: int) -> str:
    """Two groups with rates of their own that a scheduler lowers."""
    import shardplan.torch as sp

    shapes = units(LAYER, LAYER)

    def grouped(model: nn.Module) -> list[dict]:
        first, second = (list(layer.parameters())[:3] for layer in (model.layer0, model.layer1))
        return [
            {"params": first, "lr": 0.1, "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"},
            {"params": second, "weight_decay": 0.3, "nesterov": False, "ns_steps": 4},
        ]

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, give: Callable[[int], None]) -> None:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        for step in range(4):
            give(step)
            optimizer.step()
            scheduler.step()

    ours = sharded(shapes, FLOAT, make_mesh(1, ranks))
    muon = sp.Muon(ours, plan=written(document(shapes, ranks), ranks), params=grouped(ours), lr=0.02)
    run(ours, muon, lambda step: set_gradients(ours, step))

    theirs = Matrices(shapes, FLOAT).to(DEVICE)

    def give(step: int) -> None:
        for fqn, parameter in theirs.named_parameters():
            parameter.grad = gradient(fqn, tuple(parameter.shape), FLOAT, step).to(DEVICE)

    single = torch.optim.Muon(grouped(theirs), lr=0.02)
    run(theirs, single, give)
    parameters = {fqn: theirs.get_parameter(fqn).detach() for of_unit in shapes.values() for fqn in of_unit}
    momenta = {fqn: single.state[theirs.get_parameter(fqn)]["momentum_buffer"] for fqn in parameters}
    assert [{k: v for k, v in g.items() if k != "params"} for g in muon.param_groups] == [
        {k: v for k, v in g.items() if k != "params"} for g in single.param_groups
    ]
    return difference(muon, ours, parameters, momenta)


def closure(ranks: int) -> str:
    """It makes the gradients, and its value is returned."""
    model, optimizer = made(ranks)

    def make_gradients() -> float:
        assert torch.is_grad_enabled()
        set_gradients(model, 0)
        return 2.5

    if optimizer.step(make_gradients) != 2.5:
        return "the closure's value"
    return difference(optimizer, model, *in_one_process(UNITS, FLOAT, 1, {}, {}))


def versions(ranks: int) -> str:
    """Autograd sees that a saved parameter was stepped."""
    model, optimizer = made(ranks)
    versions = [parameter._version for parameter in optimizer.param_groups[0]["params"]]
    train(model, optimizer, range(1))
    stepped = [parameter._version for parameter in optimizer.param_groups[0]["params"]]
    return "" if all(now > before for before, now in zip(versions, stepped)) else f"{versions} {stepped}"


def state_dicts(ranks: int) -> str:
    """A state goes into an optimizer that has trained otherwise, and into torch's and back."""
    model, optimizer = made(ranks, lr=0.03)
    train(model, optimizer, range(2))
    kept = copy.deepcopy(optimizer.state_dict())
    values = {fqn: whole(parameter).clone() for fqn, parameter in model.named_parameters()}
    train(model, optimizer, range(7, 9))
    optimizer.param_groups[0]["lr"] = 9.0
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            rows = torch.chunk(values[fqn], ranks)[dist.get_rank() :][:1]
            if parameter.to_local().numel():
                parameter.to_local().copy_(rows[0])
    optimizer.load_state_dict(kept)
    train(model, optimizer, range(2, 4))
    if wrong := difference(optimizer, model, *in_one_process(UNITS, FLOAT, 4, {"lr": 0.03}, {})):
        return wrong

    shapes = units(LAYER)
    model, optimizer = made(ranks, shapes)
    torchs = torch.optim.Muon(optimizer.param_groups[0]["params"])
    train(model, torchs, range(1))
    optimizer.load_state_dict(torchs.state_dict())
    torchs.load_state_dict(optimizer.state_dict())
    _, momenta = in_one_process(shapes, FLOAT, 1, {}, {})
    found = {fqn: optimizer.state[model.get_parameter(fqn)]["momentum_buffer"] for fqn in momenta}
    return "".join(fqn for fqn, momentum in momenta.items() if not torch.equal(whole(found[fqn]), momentum))


def tied(ranks: int) -> str:
    """Two names of a parameter: it is stepped once."""
    import shardplan.torch as sp
    from torch.distributed.fsdp import fully_shard

    shapes = units(LAYER)
    model = Matrices(shapes, FLOAT).to(DEVICE)
    model.layer0.other_name = model.layer0.wide
    fully_shard(fully_shard(model.layer0, mesh=make_mesh(1, ranks)) and model, mesh=make_mesh(1, ranks))
    optimizer = sp.Muon(model, plan=written(document(shapes, ranks), ranks))
    train(model, optimizer, range(2))
    assert model.layer0.other_name is model.layer0.wide
    return difference(optimizer, model, *in_one_process(shapes, FLOAT, 2, {}, {}))


def exact(update: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The iterations in float64, on what torch rounds to bfloat16."""
    x = update.bfloat16().double()
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


def beside_torch_on_fsdp2(ranks: int) -> str:
    """torch.optim.Muon on the same DTensors adds products in other orders, with the same roundings. So the error of its
    iterations is of the size of ours: at most three times as large is taken. Steps add errors, times the rate."""
    from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

    shapes, rate, steps = units(LAYER, LAYER), 0.02, 3
    ours, optimizer = made(ranks, shapes, lr=rate)
    theirs = sharded(shapes, FLOAT, make_mesh(1, ranks))
    torchs = torch.optim.Muon([theirs.get_parameter(fqn) for of in shapes.values() for fqn in of], lr=rate)
    for step in range(steps):
        train(ours, optimizer, range(step, step + 1))
        train(theirs, torchs, range(step, step + 1))
    for fqn, shape in ((fqn, shape) for of in shapes.values() for fqn, shape in of.items()):
        bound, momentum = 0.0, torch.zeros(shape)
        for step in range(steps):
            given = gradient(fqn, shape, FLOAT, step)
            momentum.lerp_(given, 1 - 0.95)
            update = given.lerp(momentum, 0.95)
            rounded = _zeropower_via_newtonschulz(update, (3.4445, -4.7750, 2.0315), 5, 1e-7)
            error = (rounded.double() - exact(update)).abs().max().item()
            bound += _adjust_lr(rate, None, torch.Size(shape)) * (error + 3 * error)
        found = (whole(ours.get_parameter(fqn)) - whole(theirs.get_parameter(fqn))).abs().max().item()
        if not found <= bound:
            return f"{fqn}: {found:.2e} apart, bound {bound:.2e}"
        momenta = [o.state[m.get_parameter(fqn)]["momentum_buffer"] for m, o in ((ours, optimizer), (theirs, torchs))]
        if not torch.equal(*map(whole, momenta)):
            return f"{fqn}: momenta differ"
    return ""


def in_training(ranks: int) -> str:
    """A model that follows a plan of sp.auto, with two micro-batches, clipped gradients and AdamW for the rest. FSDP2
    with the same two optimizers is next to it."""
    import shardplan.torch as sp
    from torch.distributed.fsdp import fully_shard

    def layers() -> nn.Module:
        torch.manual_seed(3)
        made = nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)))
        return nn.Sequential(nn.Embedding(100, 64), made, nn.Linear(64, 100)).to(DEVICE)

    shapes = {
        f"1.{number}": {f"1.{number}.0.weight": (128, 64), f"1.{number}.2.weight": (64, 128)} for number in range(3)
    }
    plan = written(document(shapes, ranks), ranks)
    mesh = make_mesh(1, ranks)
    theirs = layers()
    for block in theirs[1]:
        fully_shard(block, mesh=mesh)
    ours = sp.auto(layers(), mesh, units=["1.*"], plans=None, quiet=True)
    models = {"ours": ours, "fsdp2": fully_shard(theirs, mesh=mesh)}
    seen: dict[str, list] = {name: [] for name in models}
    for name, model in models.items():
        muon = sp.Muon(model, plan=plan, lr=0.02)
        own = set(muon.param_groups[0]["params"])
        rest = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter not in own], lr=1e-3)
        for step in range(4):
            for batch in range(2):
                model.set_requires_gradient_sync(batch == 1)
                numbers = torch.Generator().manual_seed(10 * batch + dist.get_rank())
                tokens = torch.randint(100, (4, 9), generator=numbers).to(DEVICE)
                loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
            seen[name].append(loss.detach())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            muon.step()
            rest.step()
            muon.zero_grad()
            rest.zero_grad()
        seen[name] += [whole(parameter) for parameter in model.parameters()]
        if not seen[name][3] < seen[name][0]:
            return f"{name}: losses {seen[name][:4]}"
    equal = [torch.equal(*pair) for pair in zip(seen["ours"], seen["fsdp2"], strict=True)]
    return "" if all(equal) else f"differ: {equal}"


def without_owner(ranks: int) -> str:
    """A matrix that stays sharded is stepped by torch on DTensors, beside one that is exchanged."""
    import shardplan.torch as sp

    shapes = units({"wide": (64, 192), "square": (64, 64)})
    planned = document(shapes, ranks)
    planned["exchanges"][0]["matrices"] = planned["exchanges"][0]["matrices"][:1]
    instructions = planned["steps"][0]["triggers"][1]["instructions"]
    instructions[:] = [line for line in instructions if line["kind"] != "orthogonalize" or line["matrix"] == 0]
    instructions.insert(0, {"kind": "optimizer_step", "stream": "compute", "unit": "layer0", "parameter": 1})
    ours, theirs = (sharded(shapes, FLOAT, make_mesh(1, ranks)) for _ in range(2))
    muon = sp.Muon(ours, plan=written(planned, ranks), lr=0.02)
    train(ours, muon, range(2))
    torchs = torch.optim.Muon([theirs.layer0.square], lr=0.02)
    train(theirs, torchs, range(2))
    if not torch.equal(ours.layer0.square.to_local(), theirs.layer0.square.to_local()):
        return "the sharded matrix"
    parameters, momenta = in_one_process(units({"wide": (64, 192)}), FLOAT, 2, {"lr": 0.02}, {})
    return difference(muon, ours, parameters, momenta)


FEATURES = (
    without_owner, groups_and_scheduler, closure, versions, state_dicts, tied, beside_torch_on_fsdp2, in_training,
)


def run(ranks: int) -> dict[str, str]:
    said = {}
    for feature in FEATURES:
        try:
            said[feature.__name__] = feature(ranks)
        except Exception:
            said[feature.__name__] = traceback.format_exc()
    return said


def save(ranks: int, folder: str, steps: int) -> None:
    model, optimizer = made(ranks, lr=0.05)
    train(model, optimizer, range(steps))
    parts = get_state_dict(model, optimizer)
    dcp.save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=folder)


def resume(ranks: int, folder: str, begin: int, end: int) -> str:
    """On as many ranks as there are now; the state that is loaded replaces all of another training."""
    assert pathlib.Path(folder).exists()
    model, optimizer = made(ranks, lr=0.7)
    train(model, optimizer, range(50, 51))
    parts = get_state_dict(model, optimizer)
    state = {"model": parts[0], "optimizer": parts[1]}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(model, optimizer, range(begin, end))
    return difference(optimizer, model, *in_one_process(UNITS, FLOAT, end, {"lr": 0.05}, {}))
