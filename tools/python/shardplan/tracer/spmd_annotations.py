# SPDX-License-Identifier: Apache-2.0
"""Placements of plain parameters that spmd_types annotates (torchtitan's `spmd_types`): the rank's part of each, and a
type for each axis of the mesh.

`fully_shard` with `dp_mesh_dims` makes DTensors of such parameters (FSDPParam._resolve_spmd_types_for_storage). S(dim)
is cut along `dim`. R is replicated with a gradient that is a partial sum, and I is replicated with a whole gradient.
Along an axis that FSDP manages parameters are R, and it is left out, as it is for DTensors. The callable does not name
these axes. They are the axes with a name of data parallelism, and of other names than tensor parallelism's those along
which every annotated parameter is R. Experts may be cut along an axis along which others are R for FSDP: two
dimensions of the same ranks are one axis.
"""

from __future__ import annotations

import sys

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shardplan.tracer.batch_dimensions import DATA_PARALLEL, BatchDimensions
from shardplan.tracer.errors import TracerError
from shardplan.tracer.fake_meshes import known_meshes


def annotated_placements(parameters: dict[str, torch.Tensor]) -> dict[str, list[dict]]:
    """By FQN the placements of a trace document, of the parameters that have annotations."""
    if "spmd_types" not in sys.modules:
        return {}
    types = {fqn: found for fqn, parameter in parameters.items() if (found := types_of(fqn, parameter))}
    if not types:
        return {}
    import spmd_types as spmd

    meshes = known_meshes()
    names = {axis: _names(axis, meshes) for found in types.values() for axis in found}
    cut = {axis for found in types.values() for axis, kind in found.items() if kind is not spmd.R}
    batches = BatchDimensions()

    def is_fsdps(axis, kind) -> bool:
        if kind is not spmd.R or any(batches.is_same(name) for name in names[axis]):
            return False  # torchtitan's efsdp has tp's ranks where there are no experts
        return axis not in cut or not DATA_PARALLEL.isdisjoint(names[axis])

    return {
        fqn: [
            _entry(fqn, parameters[fqn], axis, found[axis], names[axis])
            for axis in sorted(found, key=_stride, reverse=True)
            if not is_fsdps(axis, found[axis]) and len(axis.layout.all_ranks_from_zero()) > 1
        ]
        for fqn, found in types.items()
    }


def placements_on(fqn: str, parameter: torch.Tensor, mesh, fsdp: set[str]) -> list[dict]:
    """The same of one parameter along the dimensions of the mesh that it is stored on, but for those of `fsdp`."""
    import spmd_types as spmd

    types = types_of(fqn, parameter)
    axes = {
        name: spmd.MeshAxis.of(mesh.get_group(name))
        for position, name in enumerate(mesh.mesh_dim_names or ())
        if name not in fsdp and mesh.size(position) > 1
    }
    return [_entry(fqn, parameter, axis, types[axis], [name]) for name, axis in axes.items() if axis in types]


def types_of(fqn: str, parameter: torch.Tensor) -> dict:
    """MeshAxis -> type, S(dim) in place of V with a PartitionSpec."""
    import spmd_types as spmd
    from spmd_types.runtime import get_partition_spec
    from spmd_types.types import partition_spec_to_shard_types

    found = dict(spmd.get_local_type(parameter))
    spec = get_partition_spec(parameter)
    if spec is not None:
        found.update(partition_spec_to_shard_types(spec))
        for entry in spec:
            if isinstance(entry, tuple) and list(entry) != sorted(entry, key=_stride, reverse=True):
                raise TracerError(f"parameter {fqn} is cut by mesh axes {entry} that are not the outermost first")
    return found


def _stride(axis) -> int:
    ranks = sorted(axis.layout.all_ranks_from_zero())
    return ranks[1] - ranks[0] if len(ranks) > 1 else 0


def _entry(fqn: str, parameter: torch.Tensor, axis, kind, names: list[str]) -> dict:
    import spmd_types as spmd

    if not names:
        raise TracerError(
            f"parameter {fqn} is annotated along a group that is no dimension of the mesh: {axis} (ranks "
            f"{sorted(axis.layout.all_ranks_from_zero())})"
        )
    name = min(names, key=lambda name: name in DATA_PARALLEL)
    entry: dict = {"mesh_dim": name, "size": len(axis.layout.all_ranks_from_zero())}
    if isinstance(kind, spmd.Shard):
        entry["dim"] = kind.dim % parameter.dim()
    elif kind is spmd.R:
        if parameter.requires_grad:
            entry["grad_partial"] = True
    elif kind is not spmd.I:
        raise TracerError(
            f"parameter {fqn} is annotated with {kind.name} along mesh dimension {name}: a parameter is cut "
            "(S), or replicated with a partial (R) or a whole gradient (I)"
        )
    return entry


def _names(axis, meshes: list) -> list[str]:
    """Names of the dimensions that it is, those of the mesh of the most dimensions first, which FSDP is given."""
    import spmd_types as spmd

    found: list[str] = []
    with unset_fake_temporarily():
        for mesh in meshes:
            for position, name in enumerate(mesh.mesh_dim_names or ()):
                if name not in found and mesh.size(position) > 1 and spmd.MeshAxis.of(mesh.get_group(name)) == axis:
                    found.append(name)
    return found
