# SPDX-License-Identifier: Apache-2.0
"""Calls of fully_shard in a framework's set-up: they mark units, and the call for the whole model is auto."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed.fsdp
import torch.nn as nn

import shardplan.torch as sp
from shardplan.tracer.sharding_calls import replaced_everywhere


@contextlib.contextmanager
def marking(root: nn.Module, **options: Any) -> Iterator[None]:
    """Inside, under whatever name it was imported. options: of shardplan.torch.auto."""

    def shard(module: nn.Module | list[nn.Module], **arguments: Any) -> nn.Module | list[nn.Module]:
        sp.unit(module, **arguments)
        if isinstance(module, nn.Module) and any(inner is root for inner in module.modules()):
            sp.auto(module, **options)
        return module

    with replaced_everywhere({torch.distributed.fsdp.fully_shard: shard}):
        yield
