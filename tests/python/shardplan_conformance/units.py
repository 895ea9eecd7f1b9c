# SPDX-License-Identifier: Apache-2.0
"""Which modules the rules of a strategy mean (docs/reference/strategy-format.md), on a model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shardplan import patterns
from shardplan_conformance.case import CaseError


@dataclass
class UnitCall:
    """One call of fully_shard, or one FSDP wrap: FQNs of its modules, and the rule that asks for it (empty for a root
    without one)."""

    modules: list[str]
    rule: dict


def matching(model: nn.Module, entry: str) -> list[str]:
    """FQNs in pre-order; a module that is registered several times by its first name."""
    return matching_names(dict(model.named_modules()), entry)


def matching_names(modules: dict[str, nn.Module], entry: str) -> list[str]:
    found = [fqn for fqn, module in modules.items() if patterns.matches(entry, fqn, type(module).__name__)]
    if not found:
        raise CaseError(f'no module is named "{entry}"')
    return found


def matches_any(entries: list[str], name: str) -> bool:
    return any(patterns.matches(entry, name) for entry in entries)


def unit_calls(model: nn.Module, strategy: dict) -> list[UnitCall]:
    """In call order, the root last."""
    if not strategy.get("units") and "size_based_wrap" not in strategy.get("fsdp1", {}):
        raise CaseError("the strategy of a recorded case names its units")
    calls = []
    for rule in strategy.get("units", []):
        found = [fqn for entry in rule["modules"] for fqn in matching(model, entry)]
        calls += [UnitCall(found, rule)] if rule.get("group") else [UnitCall([fqn], rule) for fqn in found]
    if strategy.get("fsdp2", {}).get("shard_root", True) and all("" not in call.modules for call in calls):
        calls.append(UnitCall([""], {}))
    return calls


def picked(call: UnitCall, strategy: dict, name: str):
    """A knob that a rule may give and the strategy otherwise."""
    return call.rule[name] if name in call.rule else strategy.get(name)
