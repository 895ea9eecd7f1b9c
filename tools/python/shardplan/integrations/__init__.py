# SPDX-License-Identifier: Apache-2.0
"""shardplan inside of other libraries' training loops."""

from __future__ import annotations

from typing import Any


def use_plans(framework: Any, **options: Any) -> None:
    """From now on what the framework shards trains by plans instead of FSDP2.

    framework: a transformers.Trainer or an accelerate.Accelerator, before `train` or `prepare`; a Trainer.Config of
    torchtitan, before its trainer is built. ValueError for one that does not shard with FSDP2.
    options: what shardplan.torch.auto takes besides fully_shard's arguments: policy, budget, allow, cluster, plans, ...
    """
    # Not above: `python -m shardplan.integrations.torchtitan` imports this package before it runs that module.
    from . import accelerate, torchtitan

    of = torchtitan if hasattr(framework, "model_spec") else accelerate
    of.use_plans(framework, **options)


__all__ = ["use_plans"]
