# SPDX-License-Identifier: Apache-2.0
"""Events in the form of the recordings' logs: one line each, `key=value` pairs."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def size_bytes(tensor: torch.Tensor) -> int:
    """A DTensor counts as what this rank holds."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local.numel() * local.element_size()


class EventLog:
    """`names`: FQNs by module, as the case's plain model has them."""

    def __init__(self, names: dict[torch.nn.Module, str]):
        self.names = names
        self.step = 0
        self.phase = "forward"
        self.lines: list[str] = []

    def add(self, op: str, unit: str, **keys) -> None:
        """Keys whose value is None are left out."""
        words = {"step": self.step, "phase": self.phase, "op": op, "unit": unit or "(root)", **keys}
        self.lines.append(" ".join(f"{key}={_text(value)}" for key, value in words.items() if value is not None))

    def add_tensor(self, op: str, unit: str, tensor: torch.Tensor, **keys) -> None:
        self.add(op, unit, bytes=size_bytes(tensor), dtype=dtype_name(tensor.dtype), **keys)


def _text(value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
