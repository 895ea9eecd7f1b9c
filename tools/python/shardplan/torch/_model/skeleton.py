# SPDX-License-Identifier: Apache-2.0
"""A model without its numbers and without hooks, to be traced while the model itself trains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from .._job.arguments import PlanError
from .fit import modules_of


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy in which the modules are compiled that are compiled in the model."""
    copied = copy.deepcopy(model, memo)
    if any(module._compiled_call_impl is not None for module in model.modules()):
        from shardplan.tracer import compiled  # takes seconds to import

        compiled.compile_as(model, copied)
    return copied


def _meta(model: nn.Module) -> dict[int, Any]:
    """By id of the model's parameters and buffers: what a copy has instead."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in memo:
                empty = torch.empty_like(tensor, device="meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    return memo


class Skeleton:
    """Made before a plan is applied: parameters are whole then."""

    def __init__(self, model: nn.Module, param_dtype: str | None) -> None:
        """param_dtype: what the plan computes in. None: the parameters' own. A model that cannot be copied is no error
        before it is to be traced."""
        self._param_dtype = param_dtype
        self._model: nn.Module | None = None
        self._why_not = ""
        try:
            self._model = _copied(model, _meta(model))
        except Exception as error:  # of the user's __deepcopy__, say
            self._why_not = f"{type(error).__name__}: {error}"

    def whole(self) -> nn.Module | None:
        """The model as it was, on the meta device; None: it cannot be copied."""
        return None if self._model is None else _copied(self._model, {})

    def trace(self, args: tuple, kwargs: dict[str, Any], loss: Callable[[Any], torch.Tensor] | None) -> dict[str, Any]:
        """The trace document of a step with these arguments. PlanError: it cannot be traced."""
        from shardplan.tracer import session
        from shardplan.tracer.errors import TracerError

        if self._model is None:
            raise PlanError(f"the model cannot be traced, since it cannot be copied: {self._why_not}")
        model = _copied(self._model, {})  # its tensors become fake ones
        options = session.Options(dtype=self._param_dtype, name=type(model).__name__)
        try:
            return session.trace_module(model, args, kwargs, loss, options)
        except TracerError as error:
            raise PlanError(f"the model cannot be traced: {error}") from error


def backends_of(model: nn.Module) -> dict[str, str]:
    """FQN -> backend of every module that is compiled by itself."""
    from shardplan.tracer import compiled

    found = {fqn: compiled.backend_of(module) for fqn, module in modules_of(model).items()}
    return {fqn: backend for fqn, backend in found.items() if backend}
