# SPDX-License-Identifier: Apache-2.0
"""Modules whose forward the adapter replaces, without a wrapper: the names of their parameters and their hooks stay."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn as nn


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
