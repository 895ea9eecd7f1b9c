# SPDX-License-Identifier: Apache-2.0
"""Which modules are units, and with which arguments: what fully_shard is told, as a strategy document."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from .._job.arguments import PlanError
from .fit import dtype_name, modules_of, parameters_of, unwrapped

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


def _data_parallel(dims: Any) -> dict[str, list[str]]:
    """DataParallelMeshDims in the form of a strategy."""
    return {
        kind: list(names) for kind, names in (("shard", dims.shard_names), ("replicate", dims.replicate_names)) if names
    }


class Strategy:
    """Builds the document of one model."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh | None, defaults: Arguments) -> None:
        self._model = model
        self._by_fqn = parameters_of(model)
        self._parameters = {id(found.parameter): fqn for fqn, found in reversed(self._by_fqn.items())}
        modules = modules_of(model)
        self._fqns = {id(module): fqn for fqn, module in reversed(modules.items())}
        self._fqns |= {id(unwrapped(module)): fqn for fqn, module in modules.items()}
        self._mesh, self._defaults = mesh, defaults
        self._dims = defaults.dp_mesh_dims  # of the mesh's dimensions those that are FSDP's, where a call names them
        self._ignored: set[str] = set()
        self._shard_dims: dict[str, int] = {}

    def document(self, units: Units | None) -> dict[str, Any]:
        marks = sorted(
            (vars(module)[_MARK] for module in self._model.modules() if _MARK in vars(module)),
            key=lambda mark: mark.order,
        )
        if units is not None and marks:
            raise ValueError(
                "shardplan: modules are marked with shardplan.torch.unit, and `units` is given: one of them says what "
                "units are"
            )
        given = [self._defaults.dp_mesh_dims, *(mark.arguments.dp_mesh_dims for mark in marks)]
        self._dims = next((dims for dims in given if dims is not None), None)
        meshes = [mark.arguments.mesh for mark in marks if mark.arguments.mesh is not None]
        self._mesh = self._mesh or next(iter(meshes), None)
        if other := next((mesh for mesh in meshes if mesh != self._mesh), None):
            raise PlanError(
                f"units on several meshes ({self._mesh} and {other}): write the strategy, `parameter_meshes` and "
                "`data_parallel`, and plan it"
            )
        rules = [self._marked(mark) for mark in marks] if marks else [self._rule(entry) for entry in units or []]
        if rules and not any("" in rule["modules"] for rule in rules):
            rules.append({"modules": [""]})
        document: dict[str, Any] = {"schema": "shardplan.strategy/1", "policy": "fsdp2", **self._mesh_fields()}
        document["units"] = rules
        document |= self._arguments(self._defaults, self._by_fqn)
        if self._ignored:
            document["ignored_parameters"] = sorted(self._ignored)
        if self._shard_dims:
            document["fsdp2"] = {
                "shard_dims": [{"parameters": [fqn], "dim": dim} for fqn, dim in self._shard_dims.items()]
            }
        return document

    @property
    def own_dims(self) -> set[str]:
        """Dimensions of the parameters' own mesh that are FSDP's (dp_mesh_dims)."""
        return set() if self._dims is None else {*self._dims.shard_names, *self._dims.replicate_names}

    @property
    def whole_mesh(self) -> DeviceMesh | None:
        """The mesh that the plan is applied on: all dimensions, if others than FSDP's cut parameters already."""
        if self._mesh is None or self._dims is not None or not self._is_cut():
            return self._mesh
        return self._mesh._get_root_mesh()

    def _is_cut(self) -> bool:
        return any(isinstance(found.parameter, DTensor) for found in self._by_fqn.values())

    def _fqn(self, module: nn.Module) -> str:
        fqn = self._fqns.get(id(module))
        if fqn is None:
            raise ValueError(f"shardplan: a unit's {type(module).__name__} is no module of the model")
        return fqn

    def _rule(self, entry: Any) -> dict[str, Any]:
        if isinstance(entry, str):
            return {"modules": [entry]}
        if isinstance(entry, type) and issubclass(entry, nn.Module):
            return {"modules": [f"class:{entry.__name__}"]}
        if isinstance(entry, nn.Module):
            return {"modules": [self._fqn(entry)]}
        if isinstance(entry, dict):
            return dict(entry)
        raise TypeError(
            "shardplan: units are patterns of FQNs ('layers.*'), classes, modules or rules of a strategy document, "
            f"not {type(entry).__name__}"
        )

    def _marked(self, mark: Mark) -> dict[str, Any]:
        rule: dict[str, Any] = {"modules": [self._fqn(module) for module in mark.modules]}
        if len(mark.modules) > 1:
            rule["group"] = True
        prefixes = tuple(f"{fqn}." if fqn else "" for fqn in rule["modules"])
        inside = {fqn: found for fqn, found in self._by_fqn.items() if fqn.startswith(prefixes)}
        return rule | self._arguments(mark.arguments, inside)

    def _arguments(self, arguments: Arguments, parameters: dict) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if arguments.reshard_after_forward is not None:
            fields["reshard_after_forward"] = arguments.reshard_after_forward
        if arguments.mp_policy is not None:
            fields["mixed_precision"] = self._mixed_precision(arguments.mp_policy, parameters)
        if isinstance(arguments.offload_policy, CPUOffloadPolicy):
            fields["cpu_offload"] = True
            if arguments is self._defaults:
                fields["pin_memory"] = arguments.offload_policy.pin_memory
        for parameter in arguments.ignored_params or ():
            if id(parameter) not in self._parameters:
                raise ValueError("shardplan: ignored_params has a parameter that the model does not have")
            self._ignored.add(self._parameters[id(parameter)])
        if arguments.shard_placement_fn is not None:
            self._place(arguments.shard_placement_fn, parameters)
        if arguments.dp_mesh_dims is not None:
            dims = arguments.dp_mesh_dims
            fields["data_parallel"] = _data_parallel(dims)
        return fields

    def _mixed_precision(self, policy: MixedPrecisionPolicy, parameters: dict) -> dict[str, Any]:
        names = ("param_dtype", "reduce_dtype", "output_dtype")
        fields: dict[str, Any] = {
            name: dtype_name(getattr(policy, name)) for name in names if getattr(policy, name) is not None
        }
        if not policy.cast_forward_inputs:
            fields["cast_forward_inputs"] = False
        override = getattr(policy, "param_dtype_override_fn", None)  # 2.15
        if override is not None:
            kept = [
                fqn
                for fqn, found in parameters.items()
                if override(found.parameter) == found.parameter.dtype != policy.param_dtype
            ]
            if kept:
                fields["keep_param_dtype"] = kept
        return fields

    def _place(self, function: Callable, parameters: dict) -> None:
        for fqn, found in parameters.items():
            placed = function(found.parameter)
            if placed is None:
                continue
            if not isinstance(placed, Shard):
                raise PlanError(
                    f"shard_placement_fn puts {fqn} on a mesh of its own ({type(placed).__name__}): write the "
                    "strategy (`parameter_meshes`), and plan it"
                )
            if placed.dim != 0:
                self._shard_dims[fqn] = placed.dim % found.parameter.ndim

    def _mesh_fields(self) -> dict[str, Any]:
        mesh = self._mesh
        if mesh is None:
            return {}
        if self._is_cut() or self._dims is not None:
            whole = self.whole_mesh
            if whole.mesh_dim_names is None or mesh.mesh_dim_names is None:
                raise PlanError(
                    "the mesh needs names for its dimensions (mesh_dim_names) where parameters are DTensors already, "
                    "or dp_mesh_dims names some"
                )
            names = mesh.mesh_dim_names
            own = {"shard": [names[-1]], "replicate": list(names[:-1])}
            if self._dims is not None:
                if len(self._dims.shard_names) > 1 and self._is_cut():
                    raise PlanError(
                        "dp_mesh_dims names several dimensions to shard over, and parameters are DTensors on them: "
                        "give one dimension"
                    )
                own = {"shard": [], "replicate": [], **_data_parallel(self._dims)}
                if unknown := [name for listed in own.values() for name in listed if name not in names]:
                    raise PlanError(
                        f"dp_mesh_dims names {', '.join(unknown)}, and the mesh has the dimensions {', '.join(names)}"
                    )
            dims = [{"name": name, "size": whole.size(i)} for i, name in enumerate(whole.mesh_dim_names)]
            return {"mesh": dims, "data_parallel": {kind: listed for kind, listed in own.items() if listed}}
        if mesh.ndim > 2:
            raise PlanError(
                f"fully_shard takes a mesh of one dimension, or of two (replicate, shard); found {mesh.ndim}"
            )
        kinds = ("replicate", "shard")[2 - mesh.ndim :]
        return {"mesh": [{"name": kind, "size": mesh.size(i)} for i, kind in enumerate(kinds)]}
