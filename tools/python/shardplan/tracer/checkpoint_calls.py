# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing of a builder (`checkpoint_wrapper`) as a strategy says it.

If all wrappers do the same and a strategy can say it, they are taken away, and the planner transforms the trace. The
policy of a selective one is asked which operators it keeps. Else the checkpoints stay in the model, and the trace has
what they run again.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shardplan.tracer.local_tensors import local
from shardplan.tracer.sharding_calls import Names, is_noted, make_fsdp_module

_ASKED = 6  # calls of an operator that a policy is asked about
_MATRIX_PRODUCTS = ("aten.mm", "aten.linear")
_OF_TORCH = ("use_reentrant", "early_stop", "context_fn", "preserve_rng_state", "determinism_check", "debug")


def take_away(root: nn.Module, names: Names, compiled: bool = False) -> dict[str, Any] | None:
    """The strategy's `checkpoint`. None: the model has no checkpoints, or keeps them. compiled: also those of modules
    that are compiled with them, which are not traced so."""
    wrappers = list(_wrappers(root, compiled))
    rules = {json.dumps(rule) for _, _, wrapper in wrappers if (rule := _rule(wrapper)) is not None}
    said = len(rules) == 1 and all(_rule(wrapper) is not None for _, _, wrapper in wrappers)
    for parent, name, wrapper in wrappers:
        module = wrapper._checkpoint_wrapped_module
        if is_noted(wrapper):
            make_fsdp_module(module)
        if not said:
            module._checkpoint, module._without_checkpoint = wrapper.checkpoint_fn, module.forward
            module.forward = types.MethodType(_checkpointed, module)
        parent._modules[name] = module
    if not said:
        return None
    return {"modules": [names.of(wrapper) for _, _, wrapper in wrappers], **json.loads(rules.pop())}


def _checkpointed(self: nn.Module, *arguments, **more):
    return self._checkpoint(self._without_checkpoint, *arguments, **more)


def _wrappers(root: nn.Module, compiled: bool) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Parent, name and wrapper. A checkpoint that is compiled with its module stays: the graph runs it again."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    for parent in list(root.modules()):
        for name, child in list(parent._modules.items()):
            is_compiled = child is not None and (child._compiled_call_impl is not None or hasattr(parent, "dynamo_ctx"))
            if isinstance(child, CheckpointWrapper) and (compiled or not is_compiled):
                yield parent, name, child


def _rule(wrapper: nn.Module) -> dict[str, Any] | None:
    """None: a strategy has no such rule."""
    run, given = wrapper.checkpoint_fn.func, wrapper.checkpoint_fn.keywords
    if run is not torch.utils.checkpoint.checkpoint or given.get("use_reentrant", True) or given.keys() - {*_OF_TORCH}:
        return None
    rule: dict[str, Any] = {} if given.get("early_stop", True) else {"early_stop": False}
    context = given.get("context_fn", torch.utils.checkpoint.noop_context_fn)
    if context is torch.utils.checkpoint.noop_context_fn:
        return rule
    with unset_fake_temporarily():
        shapes = {
            tuple(shape) for parameter in wrapper.parameters() for shape in (parameter.shape, local(parameter).shape)
        }
        saved = _saved(context, [shape for shape in shapes if len(shape) == 2])
    return None if saved is None else rule | {"save": saved}


def _saved(context: Callable, weights: list[tuple[int, int]]) -> list[dict[str, Any]] | None:
    """Rules of a strategy: operators that the policy keeps. None: it asks for more than the operator and how often it
    ran."""
    from torch.utils.checkpoint import CheckpointPolicy

    def keeps(operator: Any, weight: tuple[int, int] | None = None) -> list[bool]:
        first = context()[0]
        policy, told = first.policy_fn, types.SimpleNamespace(is_recompute=False)
        tensors = [torch.empty(3, 3, device="meta"), torch.empty(weight or (3, 3), device="meta")]
        answers = [policy(told, operator, *tensors) for _ in range(_ASKED)]
        return [answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE) for answer in answers]

    saved: dict[str, int] = {}
    try:
        for name, operator in _operators():
            answers = keeps(operator)
            if any(answers):
                saved[name] = 0 if all(answers) else answers.index(False) + 1
                every = saved[name]
                if every == 1 or answers != [not every or (i + 1) % every > 0 for i in range(_ASKED)]:
                    return None
            if name in _MATRIX_PRODUCTS:
                of_inputs = {shape[::-1] for shape in weights} if name == "aten.mm" else set(weights)
                if any(keeps(operator, shape) != answers for shape in of_inputs):
                    return None
    except Exception:  # a policy that looks at its arguments
        return None
    return [{"name": name} | ({"recompute_every": every} if every else {}) for name, every in saved.items()]


def _operators() -> Iterator[tuple[str, Any]]:
    """The first overload of every operator, and the higher-order ones, by the names of a strategy."""
    seen: set[str] = set()
    for full in torch._C._dispatch_get_all_op_names():
        space, _, rest = full.partition("::")
        name = rest.partition(".")[0]
        if f"{space}.{name}" in seen:
            continue
        seen.add(f"{space}.{name}")
        packet = getattr(getattr(torch.ops, space), name, None)
        overloads = packet.overloads() if hasattr(packet, "overloads") else []
        if overloads:
            first = "default" if "default" in overloads else overloads[0]
            yield f"{space}.{name}", getattr(packet, first)
    for name in ("flex_attention", "inductor_compiled_code"):
        operator = getattr(torch._higher_order_ops, name, None)
        if operator is not None:
            yield name, operator
