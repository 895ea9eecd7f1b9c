# SPDX-License-Identifier: Apache-2.0
"""Differences between the releases of PyTorch that a recorder knows. It looks at what the installed one has, not at its
number.

| | 2.11 | 2.15 |
|---|---|---|
| parameter groups of a unit | one | one for each mesh of its parameters |
| reduce-scatter inputs in flight | one, `reduce_scatter_state` | a list, `reduce_scatter_states` (a) |
| a unit whose forward ran some of its modules | stays as it is | completed: `_force_complete_incomplete_states` (a) |
| all-gather of one tensor | `all_gather_into_tensor` | `all_gather_single` |
| reduce-scatter of one tensor | `reduce_scatter_tensor` | `reduce_scatter_single` |
| recovery | none | `_reset_iter_state` of `FSDPState` (a) |
| backward that its caller finalizes | none | `finalize_backward` of `FSDPState` |

(a): since 2.13 at the latest.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_common as common
from torch.distributed.fsdp._fully_shard import _fsdp_state as states

ALL_GATHERS_OF_FSDP1 = ("all_gather_into_tensor", "all_gather_single")
REDUCE_SCATTERS_OF_FSDP1 = ("reduce_scatter_tensor", "reduce_scatter_single")
ALL_GATHERS = ("DefaultAllGather", "ProcessGroupAllocAllGather", "SymmMemAllGather")
REDUCE_SCATTERS = ("DefaultReduceScatter", "ProcessGroupAllocReduceScatter", "SymmMemReduceScatter")

# Parameters of a unit on meshes of their own.
PLACES_ON_MESHES = hasattr(common, "ShardPlacementResult")
REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")

FINALIZES_ON_CALL = hasattr(states.FSDPState, "finalize_backward")
RECOVERS = hasattr(states.FSDPState, "_reset_iter_state")
COMPLETES_GROUPS = hasattr(states.FSDPState, "_force_complete_incomplete_states")


def existing(owner, names: tuple[str, ...]) -> list[str]:
    """The names that the installed release has."""
    return [name for name in names if hasattr(owner, name)]


def parameter_groups(unit: nn.Module) -> list:
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def mesh_info(mesh: DeviceMesh):
    """The mesh info of parameters that are placed on a mesh: the last dimension shards, one before it replicates.
    PyTorch wants one object for all of them."""
    return common.HSDPMeshInfo(mesh, 1, 0) if mesh.ndim == 2 else common.FSDPMeshInfo(mesh, 0)


def placed_on(info, placement):
    """The result of shard_placement_fn for a parameter on another mesh than its unit's."""
    return common.ShardPlacementResult(placement=placement, mesh_info=info)


def group_suffix(group) -> str:
    """Which of a unit's groups it is, where there are several."""
    return f"[{group._param_group_index}]" if getattr(group, "_num_param_groups", 1) > 1 else ""


class InFlight(list):
    """The list of 2.15. `unit` says whose state enters it, `left` is told whose state leaves it."""

    def __init__(self, in_flight: list, unit: Callable[[], str], left: Callable[[str], None]):
        super().__init__(in_flight)
        self._unit, self._left = unit, left
        self._units: list[str] = []

    def append(self, state) -> None:
        super().append(state)
        self._units.append(self._unit())

    def pop(self, index: int = -1):
        self._left(self._units.pop(index))
        return super().pop(index)

    def clear(self) -> None:
        for unit in self._units:
            self._left(unit)
        self._units.clear()
        super().clear()
