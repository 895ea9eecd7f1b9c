# SPDX-License-Identifier: Apache-2.0
"""A pass that raises in its middle: FSDPModule.reset_iter_state follows it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from shardplan.tracer.containers import tensors_in


class Raised(Exception):
    """By `raising`, where it was asked for."""


@contextlib.contextmanager
def raising(model: nn.Module, in_forward: str, in_backward: str) -> Iterator[None]:
    """Inside, the forward of the module `in_forward` raises where it is entered, and a backward of what is computed
    raises where the gradient of an input of the module `in_backward` is ready. "": none does."""

    def enter(_module, _args, _kwargs) -> None:
        raise Raised

    def hook_inputs(_module, args, kwargs) -> None:
        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad:
                tensor.register_hook(_raise)
                return

    handles = [
        model.get_submodule(fqn).register_forward_pre_hook(hook, with_kwargs=True)
        for fqn, hook in ((in_forward, enter), (in_backward, hook_inputs))
        if fqn
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _raise(_gradient: torch.Tensor) -> None:
    raise Raised
