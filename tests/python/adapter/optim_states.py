# SPDX-License-Identifier: Apache-2.0
"""Functions that run on the ranks in test_adapter_optim_states.py: optimizer state dicts by FSDP1's names, next to real
FSDP1 and to plain models."""

from __future__ import annotations

import warnings

import shardplan.torch as sp
import torch
import torch.distributed as dist
import torch.nn as nn
from equivalence import Case, make_mesh, make_model
from flat_equivalence import clean
from flat_user import loss, models_of
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(
        [p for p in model.parameters() if p.requires_grad], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1
    )


def _train(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        loss(case, model, number).backward()
        optimizer.step()
        optimizer.zero_grad()


def _trained(case: Case, plan: str) -> tuple:
    ours, theirs = models_of(case, plan)
    optimizers = _optimizer(ours), _optimizer(theirs)
    for model, optimizer in zip((ours, theirs), optimizers):
        _train(case, model, optimizer, range(2))
    return ours, optimizers[0], theirs, optimizers[1]


def same(a: object, b: object) -> bool:
    """Bit for bit, through containers."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if isinstance(a, DTensor) != isinstance(b, DTensor):
            return False
        a, b = (x.to_local() if isinstance(x, DTensor) else x for x in (a, b))
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def _of_fsdp1(theirs: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    config = FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)
    with warnings.catch_warnings(), FSDP.state_dict_type(theirs, StateDictType.FULL_STATE_DICT, *config):
        warnings.simplefilter("ignore")
        found = FSDP.optim_state_dict(theirs, optimizer)
    state = {clean(name): of for name, of in found["state"].items()}
    groups = [{**g, "params": [clean(name) for name in g["params"]]} for g in found["param_groups"]]
    return {"state": state, "param_groups": groups}


def full(case: Case, plan: str) -> dict[str, bool]:
    ours, optimizer, theirs, of_theirs = _trained(case, plan)
    expected = _of_fsdp1(theirs, of_theirs)
    everywhere = sp.full_optim_state_dict(ours, optimizer, rank0_only=False)
    on_first = sp.full_optim_state_dict(ours, optimizer)
    return {
        "as FSDP1's": same(everywhere, expected),
        "on the first rank": same(on_first, expected) if dist.get_rank() == 0 else on_first == {},
        "by the kind of state dicts": same(sp.optim_state_dict(ours, optimizer), expected),
        "of a state dict": same(sp.optim_state_dict(ours, optimizer, optimizer.state_dict()), expected),
    }


def sharded(case: Case, plan: str) -> dict[str, bool]:
    ours, optimizer, theirs, of_theirs = _trained(case, plan)
    whole = _of_fsdp1(theirs, of_theirs)["state"]
    found = sp.sharded_optim_state_dict(ours, optimizer)["state"]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = {"names": found.keys() == whole.keys()}
    for name, of in found.items():
        for key, value in of.items():
            expected = whole[name][key]
            if expected.dim() == 0:
                results[f"{name} {key}"] = same(value, expected)
                continue
            pieces = torch.chunk(expected, ranks)
            piece = pieces[rank] if rank < len(pieces) else expected[:0]
            results[f"{name} {key}"] = isinstance(value, DTensor) and same(value.to_local(), piece)
    with sp.state_dict_type(ours, "sharded"):
        results["by the kind of state dicts"] = same(sp.optim_state_dict(ours, optimizer)["state"], found)
    return results


def loaded(case: Case, plan: str) -> dict[str, bool]:
    """Each way gives an optimizer the same state that it had."""
    ours, optimizer, theirs, of_theirs = _trained(case, plan)
    expected = optimizer.state_dict()
    whole = sp.full_optim_state_dict(ours, optimizer, rank0_only=False)
    parts = sp.sharded_optim_state_dict(ours, optimizer)
    given = whole if dist.get_rank() == 0 else None
    ways = {
        "sharded from full": sp.shard_full_optim_state_dict(whole, ours, optim=optimizer),
        "by parameters": sp.shard_full_optim_state_dict(whole, ours, [p for p in ours.parameters() if p.requires_grad]),
        "scattered": sp.scatter_full_optim_state_dict(given, ours, optim=optimizer, strict=True),
        "flattened from sharded": sp.flatten_sharded_optim_state_dict(parts, ours, optimizer),
        "of FSDP1's": sp.optim_state_dict_to_load(ours, optimizer, _of_fsdp1(theirs, of_theirs), strict=True),
    }
    results = {}
    for way, state_dict in ways.items():
        fresh = _optimizer(ours)
        fresh.load_state_dict(state_dict)
        results[way] = same(fresh.state_dict(), expected)
    fresh = _optimizer(ours)
    sp.optim_state_dict_to_load(ours, fresh, parts, load_directly=True)
    results["directly"] = same(fresh.state_dict(), expected)
    return results


def into_fsdp1(case: Case, plan: str) -> dict[str, bool]:
    """Real FSDP1 loads what shardplan consolidated, and a plain model does."""
    ours, optimizer, theirs, of_theirs = _trained(case, plan)
    whole = sp.full_optim_state_dict(ours, optimizer, rank0_only=False)
    fresh = _optimizer(theirs)
    config = FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)
    with FSDP.state_dict_type(theirs, StateDictType.FULL_STATE_DICT, *config):
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(theirs, fresh, whole))
    results = {"FSDP1": same(fresh.state_dict()["state"], of_theirs.state_dict()["state"])}
    alone = make_model(case)
    of_alone = _optimizer(alone)
    keyed = sp.rekey_optim_state_dict(whole, sp.OptimStateKeyType.PARAM_ID, alone, optim=of_alone)
    of_alone.load_state_dict(keyed)
    back = sp.rekey_optim_state_dict(of_alone.state_dict(), sp.OptimStateKeyType.PARAM_NAME, alone, optim=of_alone)
    results["plain and back"] = same(back["state"], whole["state"])
    return results


def _said(call) -> str:
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return ""


def refused(case: Case, plan: str) -> dict[str, bool]:
    ours, optimizer, _, _ = _trained(case, plan)
    whole = sp.full_optim_state_dict(ours, optimizer, rank0_only=False)
    name = next(iter(whole["state"]))
    without = {**whole, "state": {n: of for n, of in whole["state"].items() if n != name}}
    extra = {**whole, "state": {**whole["state"], "other": {}}}
    results = {
        "no dict": '"state"' in _said(lambda: sp.shard_full_optim_state_dict({}, ours, optim=optimizer)),
        "missing": f"missing: {name}"
        in _said(lambda: sp.shard_full_optim_state_dict(without, ours, optim=optimizer, strict=True)),
        "extra": "not in the optimizer: other"
        in _said(lambda: sp.shard_full_optim_state_dict(extra, ours, optim=optimizer, strict=True)),
        "extra, lenient": _said(lambda: sp.shard_full_optim_state_dict(extra, ours, optim=optimizer)) == "",
        "unknown name": "'other'"
        in _said(lambda: sp.rekey_optim_state_dict(extra, sp.OptimStateKeyType.PARAM_ID, make_model(case))),
    }
    parameter = next(p for p in optimizer.state if p.numel() > 0)
    if dist.get_rank() == 1:
        del optimizer.state[parameter]
    said = _said(lambda: sp.full_optim_state_dict(ours, optimizer))
    results["a rank without a state"] = "rank 1 is missing the states of" in said and "rank 0 is missing" not in said
    return results


def per_parameter(case: Case, plan: str) -> dict[str, bool]:
    """An fsdp2 plan: as torch.distributed.checkpoint.state_dict makes it, and back."""
    ours = sp.apply(make_model(case), plan, make_mesh(case))
    optimizer = _optimizer(ours)
    _train(case, ours, optimizer, range(2))
    expected = get_optimizer_state_dict(ours, optimizer, options=StateDictOptions(full_state_dict=True))["state"]
    whole = sp.full_optim_state_dict(ours, optimizer)
    everywhere = sp.full_optim_state_dict(ours, optimizer, rank0_only=False)
    ways = {
        "sharded from full": sp.shard_full_optim_state_dict(everywhere, ours, optim=optimizer, strict=True),
        "scattered": sp.scatter_full_optim_state_dict(whole if dist.get_rank() == 0 else None, ours, optim=optimizer),
        "from sharded": sp.optim_state_dict_to_load(ours, optimizer, sp.sharded_optim_state_dict(ours, optimizer)),
    }
    results = {"as torch's": same(everywhere["state"], expected), "rank 0": bool(whole) == (dist.get_rank() == 0)}
    for way, state_dict in ways.items():
        fresh = _optimizer(ours)
        fresh.load_state_dict(state_dict)
        results[way] = same(fresh.state_dict(), optimizer.state_dict())
    return results


SCENARIOS = {function.__name__: function for function in (full, sharded, loaded, into_fsdp1, refused)}


def run_all(runs: list, plans: dict[str, str]) -> dict:
    named = {**SCENARIOS, "per_parameter": per_parameter}
    return {(name, case.name): named[name](case, plans[case.name]) for name, case in runs}
