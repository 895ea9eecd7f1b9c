# SPDX-License-Identifier: Apache-2.0
"""A script for FSDP2 ported line by line: `fully_shard` becomes `sp.unit`, and `sp.auto` follows; everything else,
setters included, stays.

Runs the settings of equivalence_settings.py so, next to real FSDP2: no builder, no trace, no plan.
"""

from __future__ import annotations

import dataclasses
import os
import warnings

from equivalence import Case, Fsdp2Calls, Trainer, compare_training, make_mesh, make_model, whole_parameters, with_fsdp2
from equivalence_families import CASES as FAMILIES
from equivalence_settings import CASES as SETTINGS

# Cases that `auto` refuses, saying how they are planned instead.
REFUSED = {
    f"grad_dtypes_{name}": "a grad_dtype of None, without operators"
    for name in ("any", "any_accumulate", "any_of_all", "any_of_all_accumulate")
}


# Points do not say enough to plan these: which module of a group ran twice, which forward's gradient came.
# Every step of them is on demand; numbers are FSDP2's all the same.
ON_DEMAND = {
    "grouped_head_in_chunks",
    "grouped_head_in_chunks_accumulates",
    "grouped_head_in_chunks_hsdp",
    "group_one_runs_in_a_row",
    "group_last_runs_in_a_row",
    "group_one_runs_again_at_the_end",
    "group_twice_a_step",
    "group_kept",
    "group_checkpointed_in_a_row",
    "two_forwards_one_backward",
    "t5_accumulation",
}


def _is_ported(case: Case) -> bool:
    """Not the cases of another release and of `replicate`."""
    return (
        "pytorch" not in case.strategy
        and (case.strategy.get("data_parallel") or {"shard": True}).get("shard")
        and case.name not in REFUSED
    )


def _tolerance(case: Case) -> float:
    """A first step of several micro-batches is done on demand, with its sums in another order."""
    return max(case.tolerance, 1e-6 if len(case.strategy.get("program", [[]])[0]) > 4 else 0.0)


ALL = [dataclasses.replace(case, tolerance=_tolerance(case)) for case in [*SETTINGS, *FAMILIES] if _is_ported(case)]
# One or two of each kind; tools/nightly has every one.
SUITE = {
    "finalized_by_call_bf16", "keeps_unsharded_storage", "default", "hsdp_bf16", "flattened", "hsdp_accumulate_partial",
    "accumulate_without_communication_bf16", "accumulate_with_communication", "accumulate_one_unit_only",
    "accumulate_keep_unsharded", "reshard_to_two_bf16", "output_fp32", "grouped_head_bf16",
    "group_incomplete_accumulates", "group_kept", "nested", "frozen_units", "tied_gpt", "forward_method", "used_twice",
    "unused_unit", "divide_with_sum", "both_prefetch", "prefetch_lists", "cpu_offload_bf16", "ignored", "clip",
    "two_forwards", "rms_norms_in_float32_accumulate", "scaled_norms", "grad_dtypes_of_norms",
    "grad_dtypes_of_three_kinds_accumulate", "head_in_checkpointed_chunks_accumulate", "checkpoint_outside",
    "forward_without_gradients_between", "checkpoint_unit", "user_unshard_async", "user_reshard",
    "no_unshard_in_backward", "llama_bf16", "t5_accumulation", "flattened_but_for_one_unit",
    "on_two_meshes_bf16_accumulates",
}
CASES = ALL if os.environ.get("SHARDPLAN_ALL_SETTINGS") else [case for case in ALL if case.name in SUITE]


class _AsFound(Trainer):
    """The first steps may be on demand: there modules hold shards where the setting would leave whole parameters, which
    gradients are looked up of."""

    def step(self, number: int) -> dict:
        seen = super().step(number)
        return seen if number > 1 else {name: value for name, value in seen.items() if ": gradient of " not in name}


def compare(case: Case, plan: str) -> tuple[float, str]:
    """On a rank. plan: the folder for plans."""
    import shardplan.torch as sp
    from shardplan.torch._replay.applied import applied_to

    mesh = make_mesh(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ties, which the other test asks about
        ours_model = with_fsdp2(case, make_model(case), mesh, port=sp)
        theirs_model = with_fsdp2(case, make_model(case), mesh)
        ours = _AsFound(case, ours_model, Fsdp2Calls(ours_model))
        theirs = _AsFound(case, theirs_model, Fsdp2Calls(theirs_model))
        worst = compare_training(case, ours, theirs, whole_parameters)
    applied = applied_to(ours_model)
    on_demand = bool(applied.runtime.deviation or applied.following.unplannable)
    if on_demand != (case.name in ON_DEMAND):
        return (
            float("inf"),
            f"the last step is {'on demand' if on_demand else 'planned'}: {applied.runtime.deviation} "
            f"{applied.following.unplannable_because}",
        )
    return worst
