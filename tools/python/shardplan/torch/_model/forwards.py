# SPDX-License-Identifier: Apache-2.0
"""Forwards of modules: replaced without a wrapper, run under PyTorch's checkpoint, entered by another method, and told
apart by their arguments.

A wrapper around a module would change the names of its parameters. So the module's forward is replaced; its hooks stay
outside, as those of a wrapper do.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import checkpoint

from shardplan import patterns, selective


def replace(forwards: list[tuple[nn.Module, Callable]]) -> Callable[[], None]:
    """Gives each module its new forward. Returns what undoes it."""
    before = [(module, vars(module).get("forward")) for module, _ in forwards]
    for module, forward in forwards:
        module.forward = forward

    def undo() -> None:
        for module, forward in before:
            if forward is None:
                del module.forward
            else:
                module.forward = forward

    return undo


def recompute(plan, model: nn.Module) -> Callable[[], None]:
    """Makes the modules that the plan recomputes do so. A model with wrappers of its own is left as it is. Returns what
    undoes it."""
    rule = json.loads(plan.strategy_json).get("checkpoint")
    if not rule or any(isinstance(module, CheckpointWrapper) for module in model.modules()):
        return lambda: None
    options = {"early_stop": rule.get("early_stop", True)}
    if rule.get("save"):
        options["context_fn"] = functools.partial(selective.contexts, rule["save"])
    return replace([(module, _checkpointed(module.forward, options)) for module in _chosen(model, rule)])


def _checkpointed(forward: Callable, options: dict) -> Callable:
    @functools.wraps(forward)
    def run(*args: object, **kwargs: object) -> object:
        return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=False, **options)

    return run


def _chosen(model: nn.Module, rule: dict) -> list[nn.Module]:
    """In the order of the module tree, of which every so many-th counts."""
    named = dict(model.named_modules())
    found = [
        module
        for name, module in named.items()
        if any(patterns.matches(entry, name, type(module).__name__) for entry in rule["modules"])
    ]
    every = rule.get("every", 1)
    return found[every - 1 :: every]


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """From now on a call of the method is a call of the module: it gathers and frees the parameters of the module's
    unit, as torch.distributed.fsdp.register_fsdp_forward_method has it for FSDP2.

    To be called on the model that is traced and on the one that a plan is applied to, before either. The call goes
    through nn.Module.__call__, so that all forward hooks of the module run, also those of others. While the method
    runs, a call of the module itself runs its forward.
    """
    method = getattr(module, method_name, None)
    if not inspect.ismethod(method) or method.__self__ is not module:
        raise ValueError(f"shardplan: {type(module).__name__} has no method {method_name}")
    function = method.__func__

    @functools.wraps(function)
    def call(self, *args, **kwargs):
        def forward(*args, **kwargs):
            _restore_forward(self, before)
            return function(self, *args, **kwargs)

        before = self.__dict__.get("forward")
        self.forward = forward
        try:
            return self(*args, **kwargs)
        finally:
            if self.__dict__.get("forward") is forward:  # a hook failed before it was called
                _restore_forward(self, before)

    setattr(module, method_name, call.__get__(module))


def _restore_forward(module: nn.Module, before) -> None:
    if before is None:
        del module.forward
    else:
        module.forward = before


def described(value: Any) -> Any:
    """Shapes and dtypes of arguments, and the values of what is no tensor, as JSON has them."""
    if isinstance(value, torch.Tensor):
        return [list(value.shape), str(value.dtype), value.requires_grad]
    if isinstance(value, (list, tuple)):
        return [described(one) for one in value]
    if isinstance(value, dict):
        return {str(key): described(one) for key, one in value.items()}
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def signature_of(args: tuple, kwargs: dict) -> str:
    return json.dumps(described((args, kwargs)))
