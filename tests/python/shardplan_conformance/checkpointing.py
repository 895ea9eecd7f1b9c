# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing as a strategy asks for it: torch's wrapper around each module that a rule matches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper

from shardplan import selective
from shardplan_conformance.units import matching


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every FQN, those of modules that are registered several times included."""
    return dict(model.named_modules(remove_duplicate=False))


def wrap(model: nn.Module, strategy: dict) -> tuple[nn.Module, dict[str, nn.Module]]:
    """The model with wrappers, and its modules by the FQNs of the plain model; a wrapper stands for what it wraps."""
    modules = named_modules(model)
    rule = strategy.get("checkpoint")
    if not rule:
        return model, modules
    chosen = {modules[fqn] for entry in rule["modules"] for fqn in matching(model, entry)}
    in_order = [module for module in model.modules() if module in chosen]
    every = rule.get("every", 1)
    options = {"context_fn": functools.partial(selective.contexts, rule["save"])} if rule.get("save") else {}
    wrappers: dict[nn.Module, CheckpointWrapper] = {
        module: checkpoint_wrapper(module, **options) for module in in_order[every - 1 :: every]
    }
    for module in set(modules.values()):
        for name, child in module._modules.items():
            if child in wrappers:
                module._modules[name] = wrappers[child]
    return wrappers.get(model, model), {fqn: wrappers.get(module, module) for fqn, module in modules.items()}


@contextlib.contextmanager
def early_stop(strategy: dict) -> Iterator[None]:
    wanted = (strategy.get("checkpoint") or {}).get("early_stop", True)
    with torch.utils.checkpoint.set_checkpoint_early_stop(wanted):
        yield
