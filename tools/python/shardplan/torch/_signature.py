# SPDX-License-Identifier: Apache-2.0
"""Arguments of a forward, by what a step may depend on."""

from __future__ import annotations

import json
from typing import Any

import torch


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
