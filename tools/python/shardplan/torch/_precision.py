# SPDX-License-Identifier: Apache-2.0
"""Which dtype a unit's forward inputs and outputs are cast to: the part of mixed precision that is not in the plan's
program but in its strategy."""

from __future__ import annotations

import torch
import torch.nn as nn

from shardplan import patterns

from ._fit import unwrapped


def torch_dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def matches(entry: str, fqn: str, module: nn.Module) -> bool:
    """A unit rule's entry against a module, or a pattern over FQNs against a parameter: "class:NAME", or an FQN in which '*' and '?' do not cross a '.'."""
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
