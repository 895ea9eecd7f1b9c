# SPDX-License-Identifier: Apache-2.0
"""Arguments of the adapter's calls, how they are checked, and the error of a plan that cannot be applied."""

from __future__ import annotations

import datetime
import typing
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

OnDeviation = Literal["stop", "replan"]
Memory = Literal["allocator", "arena"]
Policy = Literal["fsdp2", "optimize"]
Decision = Literal["checkpoint", "activations", "offload", "cache-release"]
StateDictKind = Literal["full", "sharded"]


class PlanError(RuntimeError):
    """A plan that cannot be applied: unreadable, made for another model or for other ranks."""


def check_choice(name: str, given: object, kind: Any) -> None:
    """ValueError, with the choices, where `given` is none of the literals of `kind`."""
    choices = typing.get_args(kind)
    if given not in choices:
        quoted = [f'"{choice}"' for choice in choices]
        raise ValueError(f"shardplan: {name} is {', '.join(quoted[:-1])} or {quoted[-1]}, not {given!r}")


def whole_number(name: str, value: Any, least: int) -> int:
    """ValueError, with what is expected, where `value` is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"shardplan.torch.profile: {name}: found {value!r}, expected a whole number of at least {least}"
        )
    return value


def default_timeout_s() -> float:
    """The default group's: after how long without an answer its collectives fail."""
    if not dist.is_initialized():
        return dist.default_pg_timeout.total_seconds()
    group = dist.distributed_c10d._get_default_group()
    options = group._get_backend(group._device_types[0]).options
    return (options._timeout if options else dist.default_pg_timeout).total_seconds()


def seconds(timeout: float | datetime.timedelta | None) -> float:
    """Raises ValueError for what is no time to wait."""
    if timeout is None:
        return default_timeout_s()
    try:
        value = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else float(timeout)
    except (TypeError, ValueError):
        value = 0.0
    if not 0 < value < 1e9:
        raise ValueError(f"timeout is a number of seconds above 0, or a timedelta, not {timeout!r}")
    return value


def ranks_of(mesh: DeviceMesh | None) -> list[int]:
    """The mesh's, in its order. None: those of the default group."""
    return list(range(dist.get_world_size())) if mesh is None else mesh.mesh.flatten().tolist()
