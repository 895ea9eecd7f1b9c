# SPDX-License-Identifier: Apache-2.0
"""Checks of other libraries that ask peers for what differs between ranks. Played peers give what this rank gives, so
such a check is left out.

| library | check |
|---|---|
| megatron-fsdp 0.6 | `validate_uneven_dtensor`: whether any rank's shard ends where the tensor ends |
"""

from __future__ import annotations

from types import ModuleType


def patch_megatron_fsdp(uneven: ModuleType) -> None:
    """Before its names are imported elsewhere."""
    uneven.validate_uneven_dtensor = lambda *_arguments, **_settings: None
