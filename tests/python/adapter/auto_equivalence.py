"""A script for FSDP2 ported line by line: `fully_shard` becomes `sp.unit`, and `sp.auto` follows; everything else, setters included, stays.

Runs the settings of equivalence_settings.py so, next to real FSDP2: no builder, no trace, no plan.
"""

from __future__ import annotations

import warnings

from equivalence import Case, Fsdp2Calls, Trainer, compare_training, make_mesh, make_model, whole_parameters, with_fsdp2
from equivalence_families import CASES as FAMILIES
from equivalence_settings import CASES as SETTINGS

# What `auto` refuses, and says how it is planned instead.
REFUSED = {
    "flattened_but_for_one_unit": "units on several meshes",
}


def _is_ported(case: Case) -> bool:
    """Not the cases of another release, of `replicate`, and of parameters on meshes of their own."""
    return (
        "pytorch" not in case.strategy
        and (case.strategy.get("data_parallel") or {"shard": True}).get("shard")
        and not any("parameter_meshes" in rule for rule in case.strategy["units"])
        and case.name not in REFUSED
    )


CASES = [case for case in [*SETTINGS, *FAMILIES] if _is_ported(case)]
# Its first step is done on demand, where micro-batches are reduced one by one in another order of sums.
TOLERANCE = 1e-6


def compare(case: Case, plan: str) -> tuple[float, str]:
    """On a rank. plan: the folder for plans."""
    import shardplan.torch as sp

    mesh = make_mesh(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ties, which the other test asks about
        ours_model = with_fsdp2(case, make_model(case), mesh, port=sp)
        theirs_model = with_fsdp2(case, make_model(case), mesh)
        ours = Trainer(case, ours_model, Fsdp2Calls(ours_model))
        theirs = Trainer(case, theirs_model, Fsdp2Calls(theirs_model))
        return compare_training(case, ours, theirs, whole_parameters)
