# SPDX-License-Identifier: Apache-2.0
"""Rules of a plan's strategy for one unit: its mixed precision, and the mesh of its parameters."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardplan import patterns

from .._job.mesh import Given, OwnMesh, data_parallel_mesh
from .._model.fit import modules_of, unwrapped


def torch_dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def matches(entry: str, fqn: str, module: nn.Module) -> bool:
    """A unit rule's entry against a module, or a pattern over FQNs against a parameter: "class:NAME", or an FQN in
    which '*' and '?' do not cross a '.'."""
    return patterns.matches(entry, fqn, type(unwrapped(module)).__name__)


def rule_of(plan, fqn: str, module: nn.Module):
    """The strategy's rule of the unit whose first module this is, or None."""
    return next((rule for rule in plan.unit_rules if any(matches(entry, fqn, module) for entry in rule.modules)), None)


def precision_of(plan, fqn: str, module: nn.Module):
    """The mixed precision of the unit whose first module this is, or None."""
    rule = rule_of(plan, fqn, module)
    return rule and rule.mixed_precision or plan.mixed_precision


def casts_of(plan, fqn: str, module: nn.Module) -> tuple[torch.dtype | None, torch.dtype | None]:
    """(input dtype, output dtype) of the unit whose first module this is; None: left as it is."""
    precision = precision_of(plan, fqn, module)
    if precision is None:
        return None, None
    fsdp1 = plan.policy == "fsdp1"  # whose MixedPrecision casts where it is told to
    casts = precision.cast_forward_inputs
    if casts is None:
        casts = not fsdp1
    if fsdp1 and fqn == "":
        casts = casts or precision.cast_root_forward_inputs
    return torch_dtype(precision.param_dtype) if casts else None, torch_dtype(precision.output_dtype)


def mixed_precision_policy(precision) -> MixedPrecisionPolicy:
    """The policy that fully_shard takes for such a precision."""
    if precision is None:
        return MixedPrecisionPolicy()
    dtypes = {name: torch_dtype(getattr(precision, name)) for name in ("param_dtype", "reduce_dtype", "output_dtype")}
    return MixedPrecisionPolicy(**dtypes, cast_forward_inputs=precision.cast_forward_inputs is not False)


def mesh_of_unit(plan, unit, model: nn.Module, mesh: DeviceMesh, given: Given) -> OwnMesh:
    """FSDP's mesh of the unit's parameters: the user's own, else that of the plan's rules."""
    # All parameters of the unit are on one mesh.
    names = [name for p in unit.parameters[:1] for name in (p.fqn, *p.shared_with)]
    if given and not names:  # nothing of it lies anywhere
        return next(iter(given.values()))
    if own := next((given[name] for name in names if name in given), None):
        return own
    rule = rule_of(plan, unit.modules[0], modules_of(model)[unit.modules[0]])
    placed = next(
        (
            m.data_parallel
            for m in (rule.parameter_meshes if rule is not None else [])
            if any(matches(pattern, name, model) for pattern in m.parameters for name in names)
        ),
        None,
    )
    return data_parallel_mesh(plan, placed or rule and rule.data_parallel or plan.data_parallel, mesh)
