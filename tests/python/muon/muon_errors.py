# SPDX-License-Identifier: Apache-2.0
"""Calls that sp.Muon refuses, on a rank: name -> error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import torch
import torch.nn as nn
from muon_models import Matrices, make_mesh, set_gradients, sharded
from muon_plans import document, written
from muon_ranks import EXPERTS, LAYER, units
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

UNITS = units(LAYER, EXPERTS)


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def run(ranks: int) -> dict[str, str]:
    import shardplan.torch as sp

    mesh = make_mesh(1, ranks)
    model, plan = sharded(UNITS, torch.float32, mesh), document(UNITS, ranks)

    def muon(change: Callable[[dict], object] = lambda made: None, of: nn.Module = model, **arguments):
        made = copy.deepcopy(plan)
        change(made)
        return sp.Muon(of, plan=written(made, ranks), **arguments)

    def parameter(made: dict, unit: int, index: int) -> dict:
        return made["units"][unit]["parameters"][index]

    def matrix(made: dict, exchange: int, index: int) -> dict:
        return made["exchanges"][exchange]["matrices"][index]

    def on_columns(value: nn.Parameter) -> Shard | None:
        return Shard(1) if value.shape == (64, 192) else None

    by_columns = Matrices(UNITS, torch.float32)
    for unit in UNITS:
        fully_shard(by_columns.get_submodule(unit), mesh=mesh, shard_placement_fn=on_columns)
    scale = {"fqn": "layer0.scale", "shape": [8], "muon": True}
    good = muon()
    halves = [list(good.param_groups[0]["params"][i::2]) for i in range(2)]
    grouped = muon(params=[{"params": half} for half in halves])
    calls: dict[str, Callable[[], object]] = {
        "no plan": lambda: sp.Muon(model),
        "no sharded parameters": lambda: muon(of=Matrices(UNITS, torch.float32)),
        "no matrices": lambda: muon(lambda made: [p.pop("muon") for u in made["units"] for p in u["parameters"]]),
        "not in the model": lambda: muon(lambda made: parameter(made, 0, 1).update(fqn="layer0.long")),
        "shape": lambda: muon(lambda made: parameter(made, 0, 1).update(shape=[192, 32])),
        "vector": lambda: muon(lambda made: made["units"][0]["parameters"].append(scale)),
        "owner": lambda: muon(lambda made: matrix(made, 0, 1).update(owner=ranks)),
        "some owners": lambda: muon(lambda made: matrix(made, 0, 1).pop("owner")),
        "columns": lambda: muon(of=by_columns),
        "no row": lambda: muon(lambda made: made["exchanges"][1]["matrices"].pop(1)),
        "two rows": lambda: muon(lambda made: matrix(made, 1, 1).update(first_row=20)),
        "not exchanged": lambda: muon(lambda made: made["exchanges"][0]["matrices"].pop(0)),
        "other params": lambda: muon(params=[*good.param_groups[0]["params"], model.layer0.scale]),
        "less params": lambda: muon(params=good.param_groups[0]["params"][1:]),
        "groups of the state": lambda: good.load_state_dict(grouped.state_dict()),
        "arguments": lambda: muon(adjust_lr_fn="cosine"),
    }
    said = {name: raised(call) for name, call in calls.items()}

    set_gradients(model, 0)
    stepped = muon()
    stepped.step()
    said["another group"] = raised(lambda: stepped.add_param_group({"params": [model.layer0.scale]}))
    said["behind it"] = raised(stepped.step)
    wrong = stepped.state_dict()
    wrong["state"] = {number: dict(state) for number, state in wrong["state"].items()}
    wrong["state"][0]["momentum_buffer"] = torch.zeros(3, 3)
    said["shape of the state"] = raised(lambda: stepped.load_state_dict(wrong))
    turned = muon(params=stepped.param_groups[0]["params"][::-1])
    turned.step()
    said["another order"] = raised(lambda: stepped.load_state_dict(turned.state_dict()))
    said["copied"] = raised(lambda: copy.deepcopy(stepped))
    said["pickled"] = raised(lambda: pickle.dumps(stepped))
    stepped.param_groups[0]["params"].pop(0)
    said["taken out"] = raised(stepped.step)

    model.layer0.tall.grad = torch.zeros(192, 64)
    before = model.layer0.wide.to_local().clone()
    said["gradient"] = raised(good.step)
    assert torch.equal(model.layer0.wide.to_local(), before) and not good.state.get(model.layer1.few)
    return said
