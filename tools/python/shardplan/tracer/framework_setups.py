# SPDX-License-Identifier: Apache-2.0
"""Steps of frameworks around their calls of fully_shard that work on shards alone. The model's parameters are whole
where the calls are noted."""

from __future__ import annotations

import contextlib
import sys
import unittest.mock
from typing import Any

from torch import nn


def keep_whole(stack: contextlib.ExitStack) -> None:
    """accelerate with cpu_ram_efficient_loading moves the model to the meta device, and broadcasts rank 0's parameters
    into the shards. Until the stack ends, the model gets them back instead."""
    module = sys.modules.get("accelerate.utils.fsdp_utils")
    name = "fsdp2_load_full_state_dict"
    if hasattr(module, name) and getattr(module, name) is not _load_whole:
        stack.enter_context(unittest.mock.patch.object(module, name, _load_whole))


def _load_whole(accelerator: Any, model: nn.Module, full_sd: dict, cpu_offload: bool = False) -> nn.Module:
    model.load_state_dict(full_sd, assign=True)
    return model
