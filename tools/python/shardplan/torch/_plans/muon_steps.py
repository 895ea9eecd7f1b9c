# SPDX-License-Identifier: Apache-2.0
"""A trace for a plan in which Muon's matrices have owners: with Muon's step of each whole matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._job.arguments import PlanError

_OPTIMIZER = "--optimizer"


def is_muon(optimizer: str) -> bool:
    """optimizer: the value of `--optimizer`, a name and words behind it."""
    return optimizer.split("-")[0] == "muon"


def with_muon_steps(trace: dict[str, Any], strategy: dict[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """The trace itself where it has the steps, or neither the strategy nor the arguments of `shardplan plan` have Muon.
    PlanError: they cannot be recorded."""
    muon = strategy.get("optimizer", {}).get("muon")
    named = arguments[list(arguments).index(_OPTIMIZER) + 1] if _OPTIMIZER in arguments else ""
    if "optimizer_steps" in trace or (muon is None and not is_muon(named)):
        return trace
    from shardplan.tracer.errors import TracerError  # take seconds to import
    from shardplan.tracer.muon_options import NS_STEPS, MuonOptions
    from shardplan.tracer.muon_steps import optimizer_steps

    muon = muon or {}
    trains = {entry["fqn"] for entry in trace["parameters"] if entry.get("requires_grad", True)}
    options = MuonOptions(
        patterns=tuple(fqn for fqn in muon.get("matrices", ()) if fqn in trains),
        blocks=tuple(
            (pattern, rule["block_rows"])
            for rule in muon.get("compute", ())
            if "block_rows" in rule
            for pattern in rule["parameters"]
        ),
        ns_steps=muon.get("ns_steps", NS_STEPS),
        nesterov=muon.get("nesterov", True),
    )
    marked = {**trace, "parameters": [dict(entry) for entry in trace["parameters"]]}
    try:
        return {**marked, "optimizer_steps": optimizer_steps(marked, options)}
    except TracerError as error:
        raise PlanError(f"Muon's step cannot be traced: {error}") from error
