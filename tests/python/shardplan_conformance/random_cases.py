# SPDX-License-Identifier: Apache-2.0
"""Random cases: a random model, random units and random knobs. Equal seeds give equal cases."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import nn

from shardplan_conformance.case import Case, Forward
from shardplan_conformance.installed_fsdp import PLACES_ON_MESHES, REDUCES_UNUSED
from shardplan_conformance.random_models import MODES, ModelMaker, Recomputed, loss_of, recomputation_is_planned

_MAX_DRAWS = 50


@dataclass
class Drawn:
    """Facts that the choice of knobs depends on."""

    rng: random.Random
    model: nn.Module
    units: list[dict]  # rules; the root is the last
    ranks: int
    mesh: list[dict]
    data_parallel: dict | None = None

    @property
    def hybrid(self) -> bool:
        return bool((self.data_parallel or {"replicate": len(self.mesh) == 2}).get("replicate"))

    @property
    def shard(self) -> int:
        if self.data_parallel is None:
            return self.mesh[-1]["size"]
        return math.prod(dim["size"] for dim in self.mesh if dim["name"] in self.data_parallel["shard"])

    def unit_names(self) -> list[str]:
        return [rule["modules"][0] for rule in self.units]


def random_case(policy: str, seed: int) -> Case:
    """A case in which at least the first forward's loss has a gradient."""
    for draw in range(_MAX_DRAWS):
        rng = random.Random(f"{policy} {seed} {draw}")
        maker = ModelMaker(rng.randrange(2**31))
        model = maker.build()
        shape = (2,) if maker.takes_tokens else (2, maker.dim)
        x = torch.zeros(shape, dtype=torch.long if maker.takes_tokens else torch.float32)
        units = _units(rng, model, policy)
        trains = all(loss_of(model(x, mode)).requires_grad for mode in range(MODES))
        if trains and (policy == "fsdp2" or not (_is_frozen_in_part(model) and _tied_across(model, units))):
            break
    forwards = [Forward((x, mode)) for mode in range(MODES)] + [Forward((x, mode), grad=False) for mode in range(MODES)]
    ranks, mesh = _mesh(rng, policy)
    drawn = Drawn(rng, model, units, ranks, mesh)
    if policy == "fsdp2" and rng.random() < 0.15:
        drawn.ranks, drawn.mesh, drawn.data_parallel = _composed_mesh(rng)
    strategy = _fsdp2_strategy(drawn) if policy == "fsdp2" else _fsdp1_strategy(drawn)
    if drawn.rng.random() < 0.2 and (checkpointed := _checkpointed(drawn, policy)):
        strategy["checkpoint"] = {"modules": checkpointed, "early_stop": drawn.rng.random() < 0.8}
    return Case(maker.build, forwards, strategy, drawn.ranks, loss=loss_of, name=f"{policy}_{seed}")


def _mesh(rng: random.Random, policy: str) -> tuple[int, list[dict]]:
    hybrid = [(4, [2, 2]), (2, [2, 1]), *([(2, [1, 2])] if policy == "fsdp1" else [])]
    flat = [(n, [n]) for n in (1, 2, 2, 3, 4)]
    ranks, sizes = rng.choice(flat * 2 + hybrid)
    names = ["replicate", "shard"][-len(sizes) :]
    return ranks, [{"name": name, "size": size} for name, size in zip(names, sizes)]


def _composed_mesh(rng: random.Random) -> tuple[int, list[dict], dict]:
    """Four ranks in two dimensions, of which FSDP shards over one or both, or replicates over one."""
    mesh = [{"name": "outer", "size": 2}, {"name": "inner", "size": 2}]
    chosen = rng.choice(
        [
            {"shard": ["inner"]},
            {"shard": ["outer"]},
            {"shard": ["outer", "inner"]},
            {"replicate": ["outer"], "shard": ["inner"]},
        ]
    )
    return 4, mesh, chosen


def _is_unit_like(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _units(rng: random.Random, model: nn.Module, policy: str) -> list[dict]:
    """Children before their parents, as fully_shard wants them."""
    candidates = [fqn for fqn, module in model.named_modules() if fqn and _is_unit_like(module)]
    share = rng.choice([0.2, 0.4, 0.7])
    chosen = [fqn for fqn in reversed(candidates) if rng.random() < share]
    rules: list[dict] = []
    while chosen:
        fqn = chosen.pop(0)
        siblings = [other for other in chosen if other.rpartition(".")[0] == fqn.rpartition(".")[0]]
        nested = any(other.startswith(sibling + ".") for sibling in siblings for other in chosen)
        if policy == "fsdp2" and siblings and not nested and rng.random() < 0.3:
            chosen = [other for other in chosen if other not in siblings]
            rules.append({"modules": [*siblings, fqn][::-1], "group": True})
        else:
            rules.append({"modules": [fqn]})
    return [*rules, {"modules": [""]}]


def _is_frozen_in_part(module: nn.Module) -> bool:
    return any(not p.requires_grad for p in module.parameters())


def _tied_across(model: nn.Module, units: list[dict]) -> bool:
    """Whether two units hold the same parameter. FSDP gives each a copy of its own: they are tied no longer."""
    unit_of = {fqn: number for number, rule in enumerate(units) for fqn in rule["modules"]}
    owners: dict[nn.Parameter, set[int]] = {}
    for fqn, module in model.named_modules():
        nearest = fqn
        while nearest not in unit_of:
            nearest = nearest.rpartition(".")[0]
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(unit_of[nearest])
    return any(len(numbers) > 1 for numbers in owners.values())


def _checkpointed(drawn: Drawn, policy: str) -> list[str]:
    """Modules none of which is inside another, or inside a checkpoint of the model's own."""
    own = {part for m in drawn.model.modules() if isinstance(m, Recomputed) for part in m.modules()}
    names = [
        fqn
        for fqn, m in drawn.model.named_modules()
        if fqn
        and m not in own
        and _is_unit_like(m)
        and recomputation_is_planned(m)
        and (policy == "fsdp2" or _trains(m))
    ]
    drawn.rng.shuffle(names)
    chosen: list[str] = []
    for name in names[: drawn.rng.randint(1, 3)]:
        if not any(name.startswith(c + ".") or c.startswith(name + ".") for c in chosen):
            chosen.append(name)
    return chosen


def _trains(module: nn.Module) -> bool:
    """Or has no parameters (docs/internals/conformance.md)."""
    return any(p.requires_grad for p in module.parameters()) or not any(True for _ in module.parameters())


def _mixed_precision(rng: random.Random) -> dict | None:
    return rng.choice(
        [
            None,
            None,
            {"param_dtype": "bfloat16"},
            {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
            {"reduce_dtype": "bfloat16"},
        ]
    )


# ---- programs ----


def _forward(drawn: Drawn, microbatch: int = 0) -> dict:
    return {"call": "forward", "microbatch": microbatch, "trace": drawn.rng.randrange(MODES)}


def _eval(drawn: Drawn) -> dict:
    return {"call": "forward", "microbatch": 9, "trace": MODES + drawn.rng.randrange(MODES)}


def _call(method: str, value: bool | None = None, module: str = "", **more) -> dict:
    call = {"call": "module", "method": method, "module": module, **more}
    return call if value is None else {**call, "value": value}


def _backward(*microbatches: int) -> dict:
    return {"call": "backward", "microbatches": list(microbatches)}


_PROGRAMS = ["plain", "plain", "plain", "accumulate", "accumulate", "eval"]


def _program(drawn: Drawn, accumulate, user_calls, more_kinds: tuple[str, ...]) -> list[list[dict]]:
    """`accumulate`: the calls of a step with two micro-batches. `user_calls`: further calls before a forward."""
    rng = drawn.rng
    kind = rng.choice([*_PROGRAMS, *more_kinds])
    steps = []
    for _ in range(rng.choice([1, 2, 3])):
        calls = user_calls() if rng.random() < 0.3 else []
        if kind == "plain":
            calls += [_forward(drawn), _backward(0)]
        elif kind == "accumulate":
            calls += accumulate()
        elif kind == "eval":
            calls += [_eval(drawn) for _ in range(rng.choice([0, 1, 2]))] + [_forward(drawn), _backward(0)]
            calls += [_eval(drawn)] if rng.random() < 0.3 else []
        elif kind == "two forwards":
            calls += [_forward(drawn, 0), _forward(drawn, 1), _backward(0, 1)]
        else:
            order = rng.choice([(0, 1), (1, 0)])
            calls += [_forward(drawn, 0), _forward(drawn, 1), _backward(order[0]), _backward(order[1])]
        steps.append([*calls, {"call": "optimizer_step"}, {"call": "zero_grad"}])
    return steps


# ---- fsdp2 ----


def _fsdp2_strategy(drawn: Drawn) -> dict:
    rng = drawn.rng
    mixed = _mixed_precision(rng)
    divisors = [n for n in range(2, drawn.shard) if drawn.shard % n == 0]
    for rule in drawn.units:
        reshard = rng.choice([None, None, True, False, *divisors])
        if reshard is not None:
            rule["reshard_after_forward"] = reshard
        if rng.random() < 0.1:
            rule["mixed_precision"] = {**(mixed or {}), "reduce_dtype": rng.choice(["float32", "bfloat16"])}
        if rng.random() < 0.05:
            rule["cpu_offload"] = rng.random() < 0.5
        if drawn.data_parallel and rng.random() < 0.2:  # a mesh of its own, as experts have
            rule["data_parallel"] = rng.choice([{"shard": ["inner"]}, {"shard": ["outer"]}])
        meshes = _parameter_meshes(drawn, rule)
        if meshes and PLACES_ON_MESHES and type(reshard) is not int:
            rule["parameter_meshes"] = meshes
    knobs = _fsdp2_knobs(drawn)
    strategy: dict = {"policy": "fsdp2", "mesh": drawn.mesh, "units": drawn.units, "fsdp2": knobs}
    if drawn.data_parallel:
        strategy["data_parallel"] = drawn.data_parallel
    if mixed:
        strategy["mixed_precision"] = mixed
    if rng.random() < 0.15:
        strategy["cpu_offload"] = True
    if rng.random() < 0.1 and "param_dtype" not in (mixed or {}):  # ignored parameters keep their dtype
        names = [fqn for fqn, _ in drawn.model.named_parameters()]
        strategy["ignored_parameters"] = rng.sample(names, min(len(names) - 1, 2))
    strategy["setup"] = _fsdp2_setup(drawn)
    strategy["optimizer"] = {"kind": rng.choice(["sgd", "adamw"])}
    more = ("two forwards", "in turn")
    strategy["program"] = _program(drawn, lambda: _fsdp2_accumulation(drawn), lambda: _fsdp2_user_calls(drawn), more)
    if rng.random() < 0.08:
        strategy["optimizer"]["in_backward"] = True
    return strategy


def _parameter_meshes(drawn: Drawn, rule: dict) -> list[dict]:
    """Some of the unit's parameters on a part of its ranks."""
    if not drawn.data_parallel or "group" in rule or "data_parallel" in rule or drawn.rng.random() < 0.6:
        return []
    inside = [
        name
        for name, _ in drawn.model.named_parameters()
        if name.startswith(tuple(f"{m}." if m else "" for m in rule["modules"]))
    ]
    chosen = [name for name in inside if drawn.rng.random() < 0.5]
    return (
        [{"parameters": chosen, "data_parallel": {"shard": [drawn.rng.choice(["inner", "outer"])]}}] if chosen else []
    )


def _fsdp2_knobs(drawn: Drawn) -> dict:
    rng = drawn.rng
    knobs = _several_roots(drawn) if rng.random() < 0.15 else {}
    names = [] if knobs else drawn.unit_names()  # a root prefetches its own units only
    if rng.random() < 0.2:
        knobs["forward_prefetch"] = rng.choice([1, 2])
    elif names and rng.random() < 0.3:
        knobs["forward_prefetch_lists"] = _random_lists(rng, names)
    if rng.random() < 0.2:
        knobs["backward_prefetch"] = rng.choice([1, 2])
    elif names and rng.random() < 0.3:
        knobs["backward_prefetch_lists"] = _random_lists(rng, names)
    if rng.random() < 0.15:
        knobs["unshard_async_op"] = True
    if rng.random() < 0.15:
        knobs.update(force_sum_reduction=True)
        if rng.random() < 0.5:
            knobs["gradient_divide_factor"] = 3.0
    if rng.random() < 0.1:
        knobs["post_optim_event"] = True
    if rng.random() < 0.15:
        knobs["all_reduce_hooks"] = [_hook(drawn)]
    if rng.random() < 0.2 and (rules := _shard_dims(drawn)):
        knobs["shard_dims"] = rules
    return knobs


def _several_roots(drawn: Drawn) -> dict:
    """fully_shard is not called on the model's root. None of its outermost units is a group then: PyTorch refuses
    that."""
    roots = [rule for rule in drawn.units if _is_outermost(rule, drawn.units)]
    if len(roots) < 2 or any(rule.get("group") for rule in roots):
        return {}
    drawn.units = drawn.units[:-1]
    knobs: dict = {"shard_root": False}
    if drawn.rng.random() < 0.3:
        knobs["shared_comm_contexts"] = [[rule["modules"][0] for rule in drawn.rng.sample(roots, 2)]]
    return knobs


def _is_outermost(rule: dict, units: list[dict]) -> bool:
    """But for the root."""
    others = [fqn for other in units if other is not rule for fqn in other["modules"] if fqn]
    return rule["modules"] != [""] and not any(
        fqn.startswith(other + ".") for fqn in rule["modules"] for other in others
    )


def _tops(units: list[dict]) -> list[str]:
    """Modules that setters reach every unit from: the root, or where it is no unit the outermost ones."""
    if units[-1]["modules"] == [""]:
        return [""]
    return [rule["modules"][0] for rule in units if _is_outermost(rule, units)]


def _hook(drawn: Drawn) -> dict:
    rng = drawn.rng
    hook: dict = {"divide": 2.0} if rng.random() < 0.5 else {}
    if rng.random() < 0.5:
        hook["modules"] = rng.sample(drawn.unit_names(), 1)
    used = drawn.data_parallel["shard"] + drawn.data_parallel.get("replicate", []) if drawn.data_parallel else []
    free = [dim["name"] for dim in drawn.mesh if dim["name"] not in used] if drawn.data_parallel else []
    if free and not any("data_parallel" in rule for rule in drawn.units):
        hook.update(mesh_dim=free[0], reduce_op=rng.choice(["sum", "average"]))
    if not drawn.hybrid and rng.random() < 0.3:
        hook["own_stream"] = True
    return hook


def _shard_dims(drawn: Drawn) -> list[dict]:
    """Dimensions for some matrices whose rows can be cut evenly. PyTorch does not reshard these to a smaller mesh."""
    if any(type(rule.get("reshard_after_forward")) is int for rule in drawn.units) or drawn.data_parallel:
        return []
    named = [name for name, p in drawn.model.named_parameters() if p.dim() == 2 and p.shape[1] % drawn.shard == 0]
    chosen = [name for name in named if drawn.rng.random() < 0.5]
    return [{"parameters": chosen, "dim": drawn.rng.choice([1, -1])}] if chosen else []


def _random_lists(rng: random.Random, names: list[str]) -> list[dict]:
    units = rng.sample(names, rng.randint(1, len(names)))
    return [{"unit": unit, "prefetch": rng.sample(names, rng.randint(1, min(3, len(names))))} for unit in units]


def _fsdp2_setup(drawn: Drawn) -> list[dict]:
    rng, calls = drawn.rng, []
    if rng.random() < 0.1:
        calls.append(
            {
                "method": "set_reshard_after_forward", "module": rng.choice(drawn.unit_names()),
                "value": rng.random() < 0.5,
            }
        )
    if rng.random() < 0.1:
        calls.append({"method": "set_requires_gradient_sync", "module": rng.choice(drawn.unit_names()), "value": False})
    if rng.random() < 0.15 and REDUCES_UNUSED:
        calls.append(
            {"method": "set_reduce_scatter_unused_params", "module": rng.choice(drawn.unit_names()), "value": True}
        )
    if drawn.hybrid and rng.random() < 0.1:
        calls.append({"method": "set_requires_all_reduce", "module": rng.choice(drawn.unit_names()), "value": False})
    return calls


def _fsdp2_accumulation(drawn: Drawn) -> list[dict]:
    rng = drawn.rng
    setters = ["set_requires_gradient_sync", "set_is_last_backward", "set_reshard_after_backward"]
    if drawn.hybrid:
        setters.append("set_requires_all_reduce")
    chosen = rng.sample(setters, rng.randint(0, 2))
    calls = []
    for last in (False, True):
        calls += [_call(setter, last, module) for setter in chosen for module in _tops(drawn.units)]
        calls += [_forward(drawn, int(last)), _backward(int(last))]
    return calls


def _fsdp2_user_calls(drawn: Drawn) -> list[dict]:
    rng, calls = drawn.rng, []
    for _ in range(rng.randint(1, 3)):
        module = rng.choice(drawn.unit_names())
        calls.append(
            _call(*rng.choice([("unshard", True), ("unshard", False), ("reshard", None), ("state_dict", None)]), module)
        )
        if calls[-1]["method"] == "unshard" and rng.random() < 0.3:
            calls.append(_call("wait_for_unshard", None, module))
    return calls


# ---- fsdp1 ----

_FLAT = ["full_shard", "full_shard", "shard_grad_op", "shard_grad_op", "no_shard"]
_HYBRID = ["hybrid_shard", "hybrid_shard_zero2"]
_PREFETCH = ["backward_pre", "backward_pre", "backward_post", "none"]


def _fsdp1_strategy(drawn: Drawn) -> dict:
    rng = drawn.rng
    sharding = _HYBRID if drawn.hybrid else _FLAT
    frozen = _is_frozen_in_part(drawn.model)
    tied = _tied_across(drawn.model, drawn.units)  # without original parameters each has a copy of its own
    knobs = {
        "sharding": rng.choice(sharding),
        "backward_prefetch": rng.choice(_PREFETCH),
        "forward_prefetch": rng.random() < 0.3,
        "limit_all_gathers": rng.random() < 0.8,
        "use_orig_params": (rng.random() < 0.5 or frozen) and not tied,
    }
    if rng.random() < 0.2:
        knobs["full_precision_in_eval"] = True
    strategy: dict = {"policy": "fsdp1", "mesh": drawn.mesh, "units": drawn.units, "fsdp1": knobs}
    keep_low = rng.random() < 0.3
    if mixed := _mixed_precision(rng):
        strategy["mixed_precision"] = {**mixed, "keep_low_precision_grads": keep_low}
    if rng.random() < 0.3:
        _differ_by_unit(drawn, knobs, mixed)
    if rng.random() < 0.15 and all("sharding" not in rule for rule in drawn.units):
        strategy["cpu_offload"] = True
    if rng.random() < 0.1 and "param_dtype" not in (mixed or {}):  # ignored parameters keep their dtype
        names = [fqn for fqn, _ in drawn.model.named_parameters()]
        strategy["ignored_parameters"] = rng.sample(names, min(len(names) - 1, 2))
    if not drawn.hybrid and rng.random() < 0.1:
        one = "allreduce_hook" if knobs["sharding"] == "no_shard" or drawn.ranks == 1 else "reduce_scatter_hook"
        alike = all("sharding" not in rule for rule in drawn.units)
        knobs["comm_hook"] = rng.choice([*([one] if alike else []), "fp16_compress_hook", "bf16_compress_hook"])
    # AdamW takes no gradients of another dtype than their parameters'.
    strategy["optimizer"] = {"kind": "none" if mixed and keep_low else rng.choice(["sgd", "adamw"])}
    # After a backward FSDP1 has freed what another forward's needs, except on one rank.
    more = ("two forwards", "in turn") if drawn.ranks == 1 or rng.random() < 0.1 else ("two forwards",)
    strategy["program"] = _program(drawn, lambda: _fsdp1_accumulation(drawn), list, more)
    if rng.random() < 0.15:  # gradients stay over steps
        for step in strategy["program"]:
            step[:] = [call for call in step if call["call"] != "zero_grad" or rng.random() < 0.5]
    return strategy


def _differ_by_unit(drawn: Drawn, knobs: dict, mixed: dict | None) -> None:
    """Knobs that a wrap may have of its own."""
    rng = drawn.rng
    for rule in drawn.units:
        if rng.random() < 0.3:
            rule["sharding"] = rng.choice([*_HYBRID, *_FLAT] if drawn.hybrid else _FLAT)
        if rng.random() < 0.3:
            rule["backward_prefetch"] = rng.choice(_PREFETCH)
        if rng.random() < 0.3:
            rule["forward_prefetch"] = rng.random() < 0.5
        if rng.random() < 0.2:
            rule["mixed_precision"] = {**(mixed or {}), "reduce_dtype": rng.choice(["float32", "bfloat16"])}


def _fsdp1_accumulation(drawn: Drawn) -> list[dict]:
    no_sync = drawn.rng.random() < 0.6
    first = [_forward(drawn, 0), _backward(0)]
    if drawn.rng.random() < 0.2:
        first += [_forward(drawn, 2), _backward(2)]
    if no_sync:
        first = [_call("no_sync", True), *first, _call("no_sync", False)]
    return [*first, _forward(drawn, 1), _backward(1)]
