# SPDX-License-Identifier: Apache-2.0
"""Which modules are units, and with which arguments: what fully_shard is told, as a strategy document."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from shardplan.tracer import sharding_strategy
from shardplan.tracer.communicators import digits
from shardplan.tracer.errors import TracerError
from shardplan.tracer.local_tensors import placements
from shardplan.tracer.sharding_calls import Names, Sharding, Unit
from shardplan.tracer.spmd_annotations import placements_on

from .._job.arguments import PlanError
from .._job.mesh import Given, OwnMesh, mesh_of_ranks
from .annotated import is_annotated
from .fit import modules_of, parameters_of, unwrapped
from .outline import outline

_MARK = "_shardplan_mark"  # of the first module of a marked unit
_order = itertools.count()  # of the marks of a process: units are made in the order of the calls

Units = Sequence["str | type[nn.Module] | nn.Module | dict[str, Any]"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A unit's own arguments of fully_shard; None: not given."""

    mesh: DeviceMesh | None = None
    reshard_after_forward: bool | int | None = None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    offload_policy: OffloadPolicy | None = None
    ignored_params: frozenset[nn.Parameter] | None = None
    dp_mesh_dims: Any = None

    @staticmethod
    def of(given: dict[str, Any]) -> Arguments:
        """Raises TypeError for what fully_shard does not take, in Python's words."""
        if given.get("ignored_params") is not None:
            given = {**given, "ignored_params": frozenset(given["ignored_params"])}
        return Arguments(**given)

    @property
    def given(self) -> dict[str, Any]:
        """By name, those that are not None."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class Mark:
    modules: tuple[nn.Module, ...]
    arguments: Arguments
    order: int


def unit(module: nn.Module | list[nn.Module], **arguments: Any) -> nn.Module | list[nn.Module]:
    """Marks a module (modules, for one unit of all of them) as a unit of the plan that `auto` makes, as a call of
    fully_shard does.

    Takes fully_shard's arguments: mesh, reshard_after_forward, shard_placement_fn, mp_policy, offload_policy,
    ignored_params, dp_mesh_dims. So an `apply_fsdp` function ports line by line; the call for the root may stay, or be
    `auto` itself. Returns its argument.
    """
    modules = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    if not modules or not all(isinstance(one, nn.Module) for one in modules):
        raise TypeError(f"shardplan: a unit is a torch.nn.Module or a list of some, not {module!r}")
    mark = Mark(modules, Arguments.of(arguments), next(_order))
    for one in modules:
        if isinstance(one, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"shardplan: a {type(one).__name__} has no forward, so it is no unit: mark the modules in it"
            )
        if _MARK in vars(one):
            raise ValueError(f"shardplan: this {type(one).__name__} is marked as a unit already")
    object.__setattr__(modules[0], _MARK, mark)
    return module


def forget_marks(model: nn.Module) -> None:
    for module in model.modules():
        vars(module).pop(_MARK, None)


def _is_marked(module: nn.Module) -> bool:
    return _MARK in vars(module)


@dataclasses.dataclass(frozen=True)
class _Placed:
    """The place that fully_shard gives a parameter. info: of shard_placement_fn, torch's FSDPMeshInfo."""

    mesh: DeviceMesh | None
    dims: Any = None
    info: Any = None

    @property
    def own_names(self) -> set[str]:
        """FSDP's dimensions of the mesh that the parameter itself lies on."""
        return set() if self.dims is None else {*self.dims.shard_names, *self.dims.replicate_names}


class Strategy:
    """All that fully_shard is told about one model.

    document: the strategy. trace: the outline that goes with it. ranks: the job's, in the order of the plan's.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh | None, defaults: Arguments, units: Units | None = None
    ) -> None:
        """Raises PlanError, TypeError, ValueError."""
        modules, self._names = modules_of(model), Names(model)
        self._fqns = {id(module): fqn for fqn, module in reversed(modules.items())}
        self._fqns |= {id(unwrapped(module)): fqn for fqn, module in modules.items()}
        marks = sorted(
            (vars(module)[_MARK] for module in model.modules() if _is_marked(module)), key=lambda mark: mark.order
        )
        if units is not None and marks:
            raise ValueError(
                "shardplan: modules are marked with shardplan.torch.unit, and `units` is given: one of them says what "
                "units are"
            )
        calls = self._calls(model, marks, defaults.given | ({} if mesh is None else {"mesh": mesh}))
        self._placed = self._of_parameters(calls)
        self._placements, lines = self._lines(model)
        self.ranks = self._job_ranks(lines)
        self._communicators = self._digits_of(lines)
        self.trace = self.outline(model)
        try:
            document = sharding_strategy.document(Sharding(calls), self._names, self.trace, ranks=self.ranks)
        except TracerError as error:
            raise PlanError(str(error)) from error
        # The strategy's mesh has cut them.
        self._placements = {entry["fqn"]: entry.get("placements", []) for entry in self.trace["parameters"]}
        self.document = document if marks else self._by_rules(document, units)
        del self._names  # it holds the model

    def outline(self, model: nn.Module) -> dict[str, Any]:
        """The trace of the module tree of the model, or of its skeleton."""
        trace = outline(model, self._placements)
        if self._communicators:
            trace["world_size"] = len(self.ranks)
            trace["communicators"] = [{"name": name, **digit} for name, digit in self._communicators.items()]
        return trace

    def whole_mesh(self) -> DeviceMesh | None:
        """The mesh that the plan is applied on. None: all ranks of the default process group."""
        meshes = {id(placed.mesh): placed.mesh for placed in self._placed.values() if placed.mesh is not None}
        if not meshes:
            return None
        dims = [(dim["name"], dim["size"]) for dim in self.document["mesh"]]
        for mesh in [*meshes.values(), *(mesh._get_root_mesh() for mesh in meshes.values())]:
            if mesh.mesh.flatten().tolist() == self.ranks and tuple(mesh.mesh.shape) == tuple(s for _, s in dims):
                return mesh
        return mesh_of_ranks(self.ranks, dims, next(iter(meshes.values())).device_type)

    def given(self) -> Given:
        """The meshes that the user's calls name, by parameter. Collective."""
        if all(placed.mesh is None for placed in self._placed.values()):
            return {}
        device = next(placed.mesh.device_type for placed in self._placed.values() if placed.mesh is not None)

        @functools.cache
        def default() -> DeviceMesh:
            return init_device_mesh(device, (dist.get_world_size(),))

        def make(placed: _Placed) -> OwnMesh:
            if placed.info is not None:
                return OwnMesh.of_info(placed.info, placed.mesh, placed.dims)
            return OwnMesh.of(placed.mesh or default(), placed.dims)

        made: dict[tuple, OwnMesh] = {}
        found = {}
        for fqn, placed in self._placed.items():
            key = (id(placed.mesh), repr(placed.dims), id(placed.info))
            if key not in made:
                made[key] = make(placed)
            found[fqn] = made[key]
        return found

    def _calls(self, model: nn.Module, marks: list[Mark], shared: dict[str, Any]) -> list[Unit]:
        """fully_shard's calls: one for each mark, and one for the root. `shared`, or the first call with a mesh, says
        what a call leaves out."""
        called = [(list(mark.modules), shared | mark.arguments.given) for mark in marks]
        if not any(module is model for modules, _ in called for module in modules):
            called.append(([model], shared))
        first = next((arguments for _, arguments in called if "mesh" in arguments), {})
        parameters = {id(found.parameter) for found in parameters_of(model).values()}
        calls = []
        for modules, arguments in called:
            for module in modules:
                if id(module) not in self._fqns:
                    raise ValueError(f"shardplan: a unit's {type(module).__name__} is no module of the model")
            if any(id(parameter) not in parameters for parameter in arguments.get("ignored_params") or ()):
                raise ValueError("shardplan: ignored_params has a parameter that the model does not have")
            if "mesh" not in arguments:
                arguments = {name: first[name] for name in ("mesh", "dp_mesh_dims") if name in first} | arguments
            calls.append(Unit.of(modules, arguments, _is_marked))
        return calls

    def _of_parameters(self, calls: list[Unit]) -> dict[str, _Placed]:
        found = {}
        for call in calls:
            mesh, dims = call.arguments.get("mesh"), call.arguments.get("dp_mesh_dims")
            if mesh is not None and dims is not None and mesh.mesh_dim_names is None:
                raise PlanError("the mesh needs names for its dimensions (mesh_dim_names): dp_mesh_dims names some")
            for entry in call.managed:
                found[self._names.parameter(*entry)] = _Placed(mesh, dims)
            for owner, name, placed in call.placed:
                info = getattr(placed, "mesh_info", None)
                if info is not None:
                    whole, of_info = getattr(info, "spmd_mesh", None), getattr(info, "dp_mesh_dims", None)
                    found[self._names.parameter(owner, name)] = _Placed(whole or info.mesh, of_info, info)
        return found

    def _lines(self, model: nn.Module) -> tuple[dict[str, list[dict]], dict[str, tuple[int, ...]]]:
        """By FQN the placements besides FSDP's dimensions; by name of a dimension this rank's line along it."""
        by_fqn: dict[str, list[dict]] = {}
        lines: dict[str, tuple[int, ...]] = {}
        for fqn, found in parameters_of(model).items():
            parameter, placed = found.parameter, self._placed.get(fqn)
            own_names = set() if placed is None else placed.own_names
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                entries = [entry for entry in placements(parameter) if entry["mesh_dim"] not in own_names]
            elif is_annotated(parameter) and placed is not None and placed.dims is not None:
                mesh = placed.mesh
                try:
                    entries = placements_on(fqn, parameter, mesh, own_names)
                except TracerError as error:
                    raise PlanError(str(error)) from error
            else:
                continue
            names = list(mesh.mesh_dim_names or (f"dim{i}" for i in range(mesh.ndim)))
            for entry in entries:
                line = _line(mesh, names.index(entry["mesh_dim"]))
                if lines.setdefault(entry["mesh_dim"], line) != line:
                    raise PlanError(
                        f"parameters lie on two dimensions called {entry['mesh_dim']}: of the ranks "
                        f"{lines[entry['mesh_dim']]}, and of {line}"
                    )
            by_fqn[fqn] = entries
        return by_fqn, lines

    def _job_ranks(self, lines: dict[str, tuple[int, ...]]) -> list[int]:
        """All of the one mesh that there is; else all ranks that FSDP's dimensions and those of the parameters lead to.
        """
        meshes = {id(placed.mesh): placed for placed in self._placed.values()}
        only = next(iter(meshes.values()), _Placed(None))
        if len(meshes) <= 1 and not lines:
            return _world() if only.mesh is None else only.mesh.mesh.flatten().tolist()
        every = [*lines.values()]
        for placed in meshes.values():
            if placed.mesh is None:
                return _world()
            every += [_line(placed.mesh, i) for i in range(placed.mesh.ndim)]
        return _reached(every)

    def _digits_of(self, lines: dict[str, tuple[int, ...]]) -> dict[str, dict[str, int]]:
        position = {rank: place for place, rank in enumerate(self.ranks)}
        found = {}
        for name, line in lines.items():
            of_line = digits(tuple(sorted(position[rank] for rank in line)), len(self.ranks))
            if of_line is None or len(of_line) > 1:
                raise PlanError(f"the ranks along {name} ({line}) are no digit of a rank's number")
            size, stride = of_line[0] if of_line else (1, 1)
            found[name] = {"size": size, "stride": stride}
        return found

    def _by_rules(self, document: dict[str, Any], units: Units | None) -> dict[str, Any]:
        """document: of one call for the whole model, whose arguments are all units'."""
        whole = document["units"][0]
        if "reshard_after_forward" in whole:
            document["reshard_after_forward"] = whole["reshard_after_forward"]
        own = {"parameter_meshes": whole["parameter_meshes"]} if "parameter_meshes" in whole else {}
        rules = [self._rule(entry) | own for entry in units or ()]
        if (rules or own) and not any("" in rule["modules"] for rule in rules):
            rules.append({"modules": [""], **own})
        return document | {"units": rules}

    def _rule(self, entry: Any) -> dict[str, Any]:
        if isinstance(entry, str):
            return {"modules": [entry]}
        if isinstance(entry, type) and issubclass(entry, nn.Module):
            return {"modules": [f"class:{entry.__name__}"]}
        if isinstance(entry, nn.Module):
            if id(entry) not in self._fqns:
                raise ValueError(f"shardplan: a unit's {type(entry).__name__} is no module of the model")
            return {"modules": [self._fqns[id(entry)]]}
        if isinstance(entry, dict):
            return dict(entry)
        raise TypeError(
            "shardplan: units are patterns of FQNs ('layers.*'), classes, modules or rules of a strategy document, "
            f"not {type(entry).__name__}"
        )


def _world() -> list[int]:
    return list(range(dist.get_world_size()))


def _line(mesh: DeviceMesh, dim: int) -> tuple[int, ...]:
    """The ranks along a dimension from this one, in the mesh's order."""
    place = (mesh.mesh == dist.get_rank()).nonzero()
    if len(place) == 0:
        raise PlanError(f"rank {dist.get_rank()} is not in the mesh {mesh}")
    index = tuple(slice(None) if i == dim else place[0, i] for i in range(mesh.ndim))
    return tuple(mesh.mesh[index].flatten().tolist())


def _reached(lines: list[tuple[int, ...]]) -> list[int]:
    """All ranks that steps along these lead to, in the order of their numbers."""
    world, cuts, covered = dist.get_world_size(), set(), []
    for line in lines:
        of_line = digits(tuple(sorted(line)), world)
        if of_line is None:
            raise PlanError(f"the ranks {line} are no digits of a rank's number")
        covered += of_line
        cuts |= {place for size, stride in of_line for place in (stride, size * stride)}
    cuts = sorted(cuts)
    steps = [
        (low, high // low)
        for low, high in zip(cuts, cuts[1:])
        if any(stride <= low < size * stride for size, stride in covered)
    ]
    for low, high in zip(cuts, cuts[1:]):
        if high % low:
            raise PlanError(f"dimensions of the meshes overlap (at {low} and at {high} ranks)")
    rank = dist.get_rank()
    base = rank - sum(rank // low % size * low for low, size in steps)
    ranks = [base]
    for low, size in steps:
        ranks = [first + low * digit for digit in range(size) for first in ranks]
    return sorted(ranks)
