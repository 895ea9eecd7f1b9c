# SPDX-License-Identifier: Apache-2.0
"""Plain parameters that spmd_types annotates, and which fully_shard with dp_mesh_dims stores as DTensors (2.15's
FSDPParam._resolve_spmd_types_for_storage): modules compute with the plain tensor."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardplan.tracer.spmd_annotations import types_of

from .._job.arguments import PlanError
from .._job.mesh import OwnMesh


@dataclasses.dataclass(frozen=True)
class Annotation:
    """spec: the parameter's, as a DTensor on the mesh that it is stored on. gradient: what its gradient is there.
    types, partition: what its modules see."""

    spec: DTensorSpec
    gradient: DTensorSpec
    types: dict[Any, Any]
    partition: Any

    def restore(self, parameter: torch.Tensor) -> None:
        import spmd_types as spmd

        if self.types:
            spmd.assert_type(parameter, self.types, partition_spec=self.partition)


def is_annotated(parameter: torch.Tensor) -> bool:
    if "spmd_types" not in sys.modules or isinstance(parameter, DTensor):
        return False
    return bool(sys.modules["spmd_types"].get_local_type(parameter))


def annotation_of(fqn: str, parameter: torch.Tensor, own: OwnMesh) -> Annotation | None:
    """None: it has none. PlanError where fully_shard refuses it."""
    if not is_annotated(parameter):
        return None
    import spmd_types as spmd
    from spmd_types.runtime import get_partition_spec

    if own.whole is None or own.whole.mesh_dim_names is None:
        raise PlanError(
            f"parameter {fqn} has annotations of spmd_types: mesh= has to be the whole mesh, with names, and "
            "dp_mesh_dims= says which of its dimensions are FSDP's"
        )
    axes = [spmd.MeshAxis.of(own.whole.get_group(name)) for name in own.whole.mesh_dim_names]
    types, stored = spmd.get_local_type(parameter), types_of(fqn, parameter)
    ours = {*own.replicate, *own.shard}
    if missing := [own.whole.mesh_dim_names[i] for i, a in enumerate(axes) if i not in ours and a not in stored]:
        raise PlanError(f"parameter {fqn} has no annotation of spmd_types along {', '.join(missing)}")
    kinds = [spmd.R if i in ours else stored[axis] for i, axis in enumerate(axes)]

    def spec(of: list) -> DTensorSpec:
        placements = [spmd.spmd_type_to_dtensor_placement(kind) for kind in of]
        return DTensor.from_local(parameter.detach(), own.whole, placements, run_check=False)._spec

    shown = spmd.current_mesh() if set(stored) != set(axes) else None
    return Annotation(
        spec(kinds),
        spec([kind.backward_type() for kind in kinds]),
        {axis: types.get(axis, spmd.R) for axis in (shown or stored)},
        get_partition_spec(parameter),
    )
