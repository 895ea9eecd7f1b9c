# SPDX-License-Identifier: Apache-2.0
"""The strategy document of a builder's calls of `fully_shard`.

[Note: one mesh] A strategy has one mesh, and FSDP's dimensions, those of single parameters (ShardPlacementResult) and
those that tensor and expert parallelism cut along are dimensions of it. A job may have several meshes of the same
ranks: torchtitan's dense one (dp_shard, tp) and its sparse one (efsdp, ep). Each dimension is digits of a rank's
number, and the strategy's mesh has a dimension between any two places where some digit begins or ends. FSDP's
dimensions are flattened from these. A parameter that is cut along several of them (experts of ep, which lies over tp)
is cut along each in the trace that goes with the strategy. One that is replicated along several stays so along the
job's own dimension: its gradient is one sum over all of these ranks.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shardplan.tracer.communicators import digits
from shardplan.tracer.errors import TracerError
from shardplan.tracer.operators import dtype_name
from shardplan.tracer.sharding_calls import Call, Names, Sharding, Unit

Digits = tuple[tuple[int, int], ...]  # (size, stride), the outermost first


@dataclasses.dataclass(frozen=True)
class Ranks:
    """FSDP's dimensions of a call. None: there is no such dimension; no digits: it is of one rank."""

    shard: Digits | None
    replicate: Digits | None = None


class NotSaid(TracerError):
    """A strategy document has no field for what a builder does."""


def document(
    sharding: Sharding, names: Names, trace: dict, checkpoint: dict | None = None, ranks: Sequence[int] | None = None
) -> dict[str, Any]:
    """Raises NotSaid. checkpoint: the strategy's field. ranks: the job's, in the order of the plan's; None: all."""
    if sharding.unsaid:
        raise NotSaid(f"the model calls {sharding.unsaid[0]}, which a strategy document cannot say")
    if not sharding.units:
        raise NotSaid("the model never calls fully_shard, so there is no strategy to write")
    return _Document(sharding, names, trace, ranks).fields(checkpoint)


class _Document:
    def __init__(self, sharding: Sharding, names: Names, trace: dict, ranks: Sequence[int] | None) -> None:
        self._sharding, self._names, self._trace = sharding, names, trace
        self._world = trace.get("world_size", 1) if ranks is None else len(ranks)
        self._position = {rank: place for place, rank in enumerate(range(self._world) if ranks is None else ranks)}
        self._shard_dims: dict[int, list[str]] = {}
        self._unit_of = {
            names.of(module): names.of(unit.modules[0]) for unit in sharding.units for module in unit.modules
        }
        # Dimensions that FSDP is given, by size and stride; those of one rank by kind.
        self._named: dict[tuple[int, int] | str, str] = {}

    def fields(self, checkpoint: dict | None) -> dict[str, Any]:
        units = self._sharding.units
        ranks = [self._ranks(unit.arguments.get("mesh"), unit.arguments.get("dp_mesh_dims")) for unit in units]
        usual = collections.Counter(ranks).most_common(1)[0][0]
        on_meshes = [self._parameter_ranks(unit, own) for unit, own in zip(units, ranks)]
        every = [*ranks, *(theirs for by in on_meshes for theirs, _ in by.values())]
        mesh = _Mesh(self._placed(), every, self._named, self._world)
        self._cut_along_each(mesh)
        result: dict[str, Any] = {
            "schema": "shardplan.strategy/1", "policy": "fsdp2", "mesh": mesh.dims,
            "data_parallel": mesh.data_parallel(usual),
        }
        precisions = [self._mixed_precision(unit) for unit in units]
        one_precision = all(precision == precisions[0] for precision in precisions)
        rules: list[dict[str, Any]] = []
        for unit, own, parameters, precision in zip(units, ranks, on_meshes, precisions):
            rule = self._rule(unit)
            if own != usual:
                rule["data_parallel"] = mesh.data_parallel(own)
            if not one_precision:
                rule["mixed_precision"] = precision
            # Process groups of the same ranks are parameter groups of their own, too (FSDP2's _init_param_group).
            usual_group = next((group for theirs, group in parameters.values() if theirs == own), "")
            meshes: dict[tuple[Ranks, str], list[str]] = {}
            for fqn, (theirs, group) in parameters.items():
                if (theirs, group) != (own, usual_group):
                    meshes.setdefault((theirs, group), []).append(fqn)
            if meshes:
                rule["parameter_meshes"] = [
                    {"parameters": fqns, "data_parallel": mesh.data_parallel(theirs)}
                    for (theirs, _), fqns in meshes.items()
                ]
            _append(rules, rule)
        result["units"] = rules
        if one_precision and precisions[0]:
            result["mixed_precision"] = precisions[0]
        result |= self._offload()
        if ignored := sorted({self._names.parameter(*entry) for unit in units for entry in unit.ignored}):
            result["ignored_parameters"] = ignored
        setup = self._setup()
        if knobs := self._knobs(setup):
            result["fsdp2"] = knobs
        if checkpoint:
            result["checkpoint"] = checkpoint
        if setup:
            result["setup"] = [self._call(call) for call in setup]
        if self._sharding.step:
            result["program"] = [self._program()]
        return result

    def _rule(self, unit: Unit) -> dict[str, Any]:
        rule: dict[str, Any] = {"modules": [self._names.of(module) for module in unit.modules]}
        if len(unit.modules) > 1:
            rule["group"] = True
        if unit.arguments.get("reshard_after_forward") is not None:
            rule["reshard_after_forward"] = unit.arguments["reshard_after_forward"]
        if _pin_memory(unit) is not None and not self._all_offload():
            rule["cpu_offload"] = True
        return rule

    def _ranks(self, mesh: Any, dims: Any) -> Ranks:
        """FSDP's dimensions of a mesh that fully_shard is given; None: of all ranks."""
        if mesh is None:
            self._named.setdefault((self._world, 1), "shard")
            return Ranks(((self._world, 1),) if self._world > 1 else ())
        names = list(mesh.mesh_dim_names or ())
        if dims is not None:
            shard = [names.index(name) for name in dims.shard_names] or None
            replicate = [names.index(name) for name in dims.replicate_names] or None
        elif mesh.ndim > 2:
            raise TracerError(f"fully_shard takes a mesh of one or two dimensions; found {mesh.ndim}")
        else:
            shard, replicate = [mesh.ndim - 1], [0] if mesh.ndim == 2 else None
        own = [*(shard or ()), *(replicate or ())]
        for dims_of in (shard or [], replicate or [], *([dim] for dim in own)):
            kind = "shard" if dims_of and dims_of[0] in (shard or ()) else "replicate"
            found = self._digits(mesh, dims_of) if dims_of else ()
            many = [names[dim] for dim in dims_of if mesh.size(dim) > 1] if names else []
            if len(found) == 1:
                self._named.setdefault(found[0], "_".join(many) or kind)
            elif names and dims_of and not many:
                self._named.setdefault(kind, names[dims_of[0]])
        return Ranks(*(None if part is None else self._digits(mesh, part) for part in (shard, replicate)))

    def _digits(self, mesh: Any, dims: list[int]) -> Digits:
        with unset_fake_temporarily():
            numbers = mesh.mesh.cpu()
            place = (numbers == dist.get_rank()).nonzero()
            if len(place) == 0:
                raise NotSaid("fully_shard is given a mesh without this rank")
            index = tuple(slice(None) if dim in dims else place[0, dim] for dim in range(mesh.ndim))
            ranks = tuple(numbers[index].flatten().tolist()) if dims else ()
        places = tuple(sorted(self._position[rank] for rank in ranks if rank in self._position))
        found = digits(places, self._world) if len(places) == len(ranks) else None
        if found is None:
            raise NotSaid(f"fully_shard is given a mesh whose ranks {ranks} are no digits of a rank's number")
        return tuple(found)

    def _parameter_ranks(self, unit: Unit, own: Ranks) -> dict[str, tuple[Ranks, str]]:
        """The ranks, and the name of the process group, of parameters that shard_placement_fn puts on a mesh; notes the
        dimensions that it cuts along."""
        found: dict[str, tuple[Ranks, str]] = {}
        for owner, name, placed in unit.placed:
            fqn = self._names.parameter(owner, name)
            info = getattr(placed, "mesh_info", None)
            if info is not None:
                if getattr(info, "shard_mesh_dim", None) is None:
                    raise NotSaid(f"shard_placement_fn puts {fqn} on a mesh without a dimension to shard over")
                whole = getattr(info, "spmd_mesh", None)
                theirs = self._ranks(info.mesh, None) if whole is None else self._ranks(whole, info.dp_mesh_dims)
                found[fqn] = theirs, info.shard_process_group.group_name
                placed = placed.placement
            dim = getattr(placed, "dim", 0)
            if dim:
                self._shard_dims.setdefault(dim, []).append(fqn)
        return found

    def _placed(self) -> dict[str, tuple[int, int]]:
        """Dimensions that parameters are placed along: size and stride."""
        groups = {entry["name"]: entry for entry in self._trace.get("communicators", ())}
        found: dict[str, tuple[int, int]] = {}
        for parameter in self._trace["parameters"]:
            for placement in parameter.get("placements", ()):
                name, size = placement["mesh_dim"], placement["size"]
                group = groups.get(name)
                if group is None or group["size"] != size or group.get("dims"):
                    raise NotSaid(
                        f"{parameter['fqn']} lies on mesh dimension {name}, and the trace does not say which ranks "
                        "that are"
                    )
                found[name] = (size, group.get("stride", 1))
        return found

    def _cut_along_each(self, mesh: _Mesh) -> None:
        """See [Note: one mesh]; changes the trace."""
        for parameter in self._trace["parameters"]:
            placements = []
            for placement in parameter.get("placements", ()):
                inside = mesh.split.get(placement["mesh_dim"])
                if inside is None or "dim" not in placement:
                    placements.append(placement)
                    continue
                placements += [{**placement, "mesh_dim": name, "size": mesh.size(name)} for name in inside]
            if placements:
                parameter["placements"] = placements

    def _mixed_precision(self, unit: Unit) -> dict[str, Any]:
        policy = unit.arguments.get("mp_policy")
        if policy is None:
            return {}
        fields: dict[str, Any] = {
            name: dtype_name(getattr(policy, name))
            for name in ("param_dtype", "reduce_dtype", "output_dtype")
            if getattr(policy, name) is not None
        }
        if not policy.cast_forward_inputs:
            fields["cast_forward_inputs"] = False
        if unit.kept:
            fields["keep_param_dtype"] = [self._names.parameter(*entry) for entry in unit.kept]
        return fields

    def _offload(self) -> dict[str, Any]:
        pins = {_pin_memory(unit) for unit in self._sharding.units} - {None}
        if len(pins) > 1:
            raise NotSaid("fully_shard is given offload policies with and without pinned memory")
        fields: dict[str, Any] = {"cpu_offload": True} if self._all_offload() else {}
        return fields | ({"pin_memory": False} if pins == {False} else {})

    def _all_offload(self) -> bool:
        return all(_pin_memory(unit) is not None for unit in self._sharding.units)

    def _setup(self) -> list[Call]:
        """Without calls that the next one of the same module undoes."""
        last = {
            (call.method, id(call.module)): call for call in self._sharding.setup if not call.arguments.get("recurse")
        }
        return [call for call in self._sharding.setup if last.get((call.method, id(call.module)), call) is call]

    def _knobs(self, setup: list[Call]) -> dict[str, Any]:
        """Takes calls out of the set-up that a knob says."""
        knobs: dict[str, Any] = {}
        units = set(self._unit_of.values())
        divides = [call for call in setup if call.method == "set_gradient_divide_factor"]
        factors = {call.arguments["number"] for call in divides}
        if len(factors) == 1 and {self._unit(call.module) for call in divides} == units:
            knobs["gradient_divide_factor"] = factors.pop()
            setup[:] = [call for call in setup if call not in divides]
        for method, knob in (
            ("set_modules_to_forward_prefetch", "forward_prefetch_lists"),
            ("set_modules_to_backward_prefetch", "backward_prefetch_lists"),
        ):
            calls = [call for call in setup if call.method == method]
            if calls:
                knobs[knob] = [
                    {
                        "unit": self._unit(call.module),
                        "prefetch": list(dict.fromkeys(self._unit(module) for module in call.modules)),
                    }
                    for call in calls
                ]
                setup[:] = [call for call in setup if call not in calls]
        if self._shard_dims:
            knobs["shard_dims"] = [{"parameters": fqns, "dim": dim} for dim, fqns in self._shard_dims.items()]
        if "" not in self._unit_of:
            knobs["shard_root"] = False
        if self._sharding.shared:
            knobs["shared_comm_contexts"] = [[self._names.of(m) for m in ms] for ms in self._sharding.shared]
        return knobs

    def _unit(self, module: Any) -> str:
        return self._unit_of[self._names.of(module)]

    def _call(self, call: Call) -> dict[str, Any]:
        fields = {"call": "module", "method": call.method, "module": self._names.of(call.module), **call.arguments}
        if call.modules:
            fields["modules"] = [self._names.of(module) for module in call.modules]
        return fields

    def _program(self) -> list[dict[str, Any]]:
        """The passes of the step with the calls between them."""
        order = self._trace.get("calls") or [
            *(["forward", number] for number in range(len(self._trace["forwards"]))),
            *(["backward", number] for number in range(len(self._trace["backwards"]))),
        ]
        steps: list[dict[str, Any]] = []
        calls = collections.deque(self._sharding.step)
        for position, (kind, number) in enumerate(order):
            while calls and calls[0][0] <= position:
                steps.append(self._call(calls.popleft()[1]))
            steps.append({"call": kind, "trace": number} if number else {"call": kind})
        steps += [self._call(call) for _, call in calls]
        return [*steps, {"call": "optimizer_step"}, {"call": "zero_grad"}]


def _pin_memory(unit: Unit) -> bool | None:
    """None: its shards are on the device."""
    return getattr(unit.arguments.get("offload_policy"), "pin_memory", None)


def _append(rules: list[dict[str, Any]], rule: dict[str, Any]) -> None:
    """Calls with the same arguments one behind the other are one rule, whose matches are a unit each."""
    if rules and not rule.get("group") and _arguments(rules[-1]) == _arguments(rule):
        rules[-1]["modules"] += rule["modules"]
        for meshes, more in zip(rules[-1].get("parameter_meshes", ()), rule.get("parameter_meshes", ())):
            meshes["parameters"] += more["parameters"]
        return
    rules.append(rule)


def _arguments(rule: dict[str, Any]) -> dict[str, Any]:
    meshes = [entry["data_parallel"] for entry in rule.get("parameter_meshes", ())]
    return {name: value for name, value in rule.items() if name != "modules"} | {"parameter_meshes": meshes}


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


class _Mesh:
    """See [Note: one mesh]. placed: by name; named: names of FSDP's dimensions (_Document)."""

    def __init__(
        self, placed: dict[str, tuple[int, int]], ranks: Iterable[Ranks], named: dict[tuple[int, int] | str, str],
        world: int,
    ) -> None:
        alone = [name for name, (size, _) in placed.items() if size == 1]
        placed = {name: digit for name, digit in placed.items() if name not in alone}
        ranks = list(ranks)
        every = [digit for own in ranks for part in (own.shard, own.replicate) for digit in part or ()]
        places = sorted({1, world, *(place for size, stride in (*placed.values(), *every)
                                     for place in (stride, size * stride))})
        for low, high in zip(places, places[1:]):
            if high % low:
                raise NotSaid(
                    f"dimensions of the job's meshes overlap (at {low} and at {high} ranks), and no mesh of a strategy "
                    "has all of them"
                )
        by_digit = {digit: name for name, digit in placed.items()}
        self._dims: list[tuple[str, int, int]] = []  # name, size, stride; the innermost first
        taken = set(placed)
        for low, high in zip(places, places[1:]):
            digit = (high // low, low)
            over = [found for found, (size, stride) in placed.items() if stride <= low < stride * size]
            unnamed = f"{over[0]}_{len(self._dims)}" if over else f"shard_{len(self._dims)}"
            name = by_digit.get(digit) or named.get(digit) or unnamed
            if digit not in by_digit:
                name = _free(name, taken)
                taken.add(name)
            self._dims.append((name, *digit))
        # By dimension that lies over several: those.
        self.split = {
            name: inside for name, digit in placed.items() if (inside := self._inside(digit)) != [name]
        }
        self._dims += [(name, 1, world) for name in alone]
        self._one: dict[str, str] = {}
        for kind in ("replicate", "shard"):
            if any(getattr(own, kind) == () for own in ranks):
                self._one[kind] = _free(named.get(kind, kind), {name for name, *_ in self._dims})
                self._dims.append((self._one[kind], 1, world))

    @property
    def dims(self) -> list[dict[str, Any]]:
        return [{"name": name, "size": size} for name, size, _ in reversed(self._dims)]

    def size(self, name: str) -> int:
        return next(size for found, size, _ in self._dims if found == name)

    def data_parallel(self, ranks: Ranks) -> dict[str, list[str]]:
        """Digits of one rank are of a dimension of that size."""
        return {
            kind: [name for digit in digits_of for name in self._inside(digit)] or [self._one[kind]]
            for kind in ("shard", "replicate")
            if (digits_of := getattr(ranks, kind)) is not None
        }

    def _inside(self, digit: tuple[int, int]) -> list[str]:
        """Dimensions that make up these digits, the outermost first."""
        size, stride = digit
        return [name for name, _, own in reversed(self._dims) if stride <= own < stride * size]
