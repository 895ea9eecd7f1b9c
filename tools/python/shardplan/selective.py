# SPDX-License-Identifier: Apache-2.0
"""Selective activation checkpointing as a strategy's `checkpoint.save` says it."""

from __future__ import annotations

import collections

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def contexts(rules: list[dict]) -> tuple:
    """A `context_fn` of torch's checkpoint: the rules' operators are kept, but every so many-th of a module's."""
    every = {rule["name"]: rule.get("recompute_every", 0) for rule in rules}
    counts: collections.Counter = collections.Counter()

    def policy(context: object, operator: object, *_: object, **__: object) -> CheckpointPolicy:
        # "aten.mm" of aten.mm.default; higher-order operators have no overloads.
        name = str(operator).rpartition(".")[0] or str(operator)
        if name not in every:
            return CheckpointPolicy.PREFER_RECOMPUTE
        counts[context.is_recompute, name] += 1
        again = every[name] > 0 and counts[context.is_recompute, name] % every[name] == 0
        return CheckpointPolicy.PREFER_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)
