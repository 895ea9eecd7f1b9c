# SPDX-License-Identifier: Apache-2.0
"""Arguments that are one of some strings: their types, and the check of what is given."""

from __future__ import annotations

import typing
from typing import Any, Literal

OnDeviation = Literal["stop", "replan"]
Memory = Literal["allocator", "arena"]
Policy = Literal["fsdp2", "optimize"]
Decision = Literal["checkpoint", "activations", "offload", "cache-release"]
StateDictKind = Literal["full", "sharded"]


def check_choice(name: str, given: object, kind: Any) -> None:
    """ValueError, with the choices, where `given` is none of the literals of `kind`."""
    choices = typing.get_args(kind)
    if given not in choices:
        quoted = [f'"{choice}"' for choice in choices]
        raise ValueError(f"shardplan: {name} is {', '.join(quoted[:-1])} or {quoted[-1]}, not {given!r}")
