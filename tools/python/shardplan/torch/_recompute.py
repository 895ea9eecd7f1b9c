"""Activation checkpointing as the plan's strategy has it: PyTorch's wrapper around the modules that are recomputed."""

from __future__ import annotations

import collections
import functools
import json
import re

import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def recompute(plan, model: nn.Module) -> None:
    """Wraps what the plan recomputes, in place. A model with wrappers of its own is left as it is."""
    rule = json.loads(plan.strategy_json).get("checkpoint")
    if not rule or any(isinstance(module, CheckpointWrapper) for module in model.modules()):
        return
    chosen = _chosen(model, rule)
    saved = {entry["name"]: entry.get("recompute_every", 0) for entry in rule.get("save", [])}
    options = {"context_fn": functools.partial(_keeping, saved)} if saved else {}
    wrappers = {module: checkpoint_wrapper(module, early_stop=rule.get("early_stop", True), **options) for module in chosen}
    for parent in list(model.modules()):
        if isinstance(parent, CheckpointWrapper):
            continue
        for name, child in parent._modules.items():
            if child in wrappers:
                parent._modules[name] = wrappers[child]


def _chosen(model: nn.Module, rule: dict) -> list[nn.Module]:
    """In the order of the module tree, of which every so many-th counts."""
    named = dict(model.named_modules())
    found = [module for name, module in named.items() if module is not model and any(_matches(entry, name, module) for entry in rule["modules"])]
    every = rule.get("every", 1)
    return found[every - 1 :: every]


def _matches(entry: str, name: str, module: nn.Module) -> bool:
    if entry.startswith("class:"):
        return type(module).__name__ == entry.removeprefix("class:")
    pattern = "".join({"*": "[^.]*", "?": "[^.]"}.get(character, re.escape(character)) for character in entry)
    return re.fullmatch(pattern, name) is not None


def _keeping(saved: dict[str, int]) -> tuple:
    """The results of these operators are kept, but of every so many-th of a module's."""
    seen: collections.Counter = collections.Counter()

    def policy(context: object, operator: object, *_: object, **__: object) -> CheckpointPolicy:
        name = str(operator).rpartition(".")[0]
        if name not in saved:
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen[context.is_recompute, name] += 1
        again = saved[name] > 0 and seen[context.is_recompute, name] % saved[name] == 0
        return CheckpointPolicy.PREFER_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)
