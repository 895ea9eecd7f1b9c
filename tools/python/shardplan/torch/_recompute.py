# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing as the plan's strategy has it: the forwards of modules run under PyTorch's checkpoint.

A wrapper around a module would change the names of its parameters. So the module's forward is replaced, and its hooks stay outside, as those
of a wrapper are.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import checkpoint

from shardplan import patterns, selective

from . import _forwards


def recompute(plan, model: nn.Module) -> Callable[[], None]:
    """Makes the modules that the plan recomputes do so. A model with wrappers of its own is left as it is. Returns what undoes it."""
    rule = json.loads(plan.strategy_json).get("checkpoint")
    if not rule or any(isinstance(module, CheckpointWrapper) for module in model.modules()):
        return lambda: None
    options = {"early_stop": rule.get("early_stop", True)}
    if rule.get("save"):
        options["context_fn"] = functools.partial(selective.contexts, rule["save"])
    return _forwards.replace([(module, _checkpointed(module.forward, options)) for module in _chosen(model, rule)])


def _checkpointed(forward: Callable, options: dict) -> Callable:
    @functools.wraps(forward)
    def run(*args: object, **kwargs: object) -> object:
        return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=False, **options)

    return run


def _chosen(model: nn.Module, rule: dict) -> list[nn.Module]:
    """In the order of the module tree, of which every so many-th counts."""
    named = dict(model.named_modules())
    found = [module for name, module in named.items() if any(patterns.matches(entry, name, type(module).__name__) for entry in rule["modules"])]
    every = rule.get("every", 1)
    return found[every - 1 :: every]
