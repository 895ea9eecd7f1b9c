# SPDX-License-Identifier: Apache-2.0
"""Methods besides forward that run a unit's hooks."""

from __future__ import annotations

import functools
import inspect

import torch.nn as nn


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """From now on a call of the method is a call of the module: it gathers and frees the parameters of the module's unit,
    as torch.distributed.fsdp.register_fsdp_forward_method has it for FSDP2.

    To be called on the model that is traced and on the one that a plan is applied to, before either. The call goes
    through nn.Module.__call__, so that all forward hooks of the module run, also those of others. While the method runs, a
    call of the module itself runs its forward.
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
