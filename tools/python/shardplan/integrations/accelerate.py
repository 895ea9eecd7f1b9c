# SPDX-License-Identifier: Apache-2.0
"""Hugging Face accelerate, and the Trainer of transformers that is built on it.

Both shard a model in `Accelerator.prepare`, with calls of fully_shard. Inside of that call, and nowhere else,
fully_shard marks units, and the call for the whole model is `shardplan.torch.auto`: so the units, dtypes and meshes are
those that accelerate chooses.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.nn as nn

from shardplan.integrations.marking import marking

_HOW = (
    "a Trainer is given TrainingArguments(fsdp='full_shard', fsdp_config={'fsdp_version': 2}), an Accelerator "
    "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)"
)


def use_plans(trainer_or_accelerator: Any, **options: Any) -> None:
    """From now on models that are prepared train by plans instead of FSDP2. Call it before `trainer.train()`, or
    `accelerator.prepare`.

    trainer_or_accelerator: a transformers.Trainer, or an accelerate.Accelerator, that shards with FSDP2. ValueError for
    another one.
    options: what shardplan.torch.auto takes besides fully_shard's arguments.
    """
    accelerator = getattr(trainer_or_accelerator, "accelerator", trainer_or_accelerator)
    if not getattr(accelerator, "is_fsdp2", False):
        raise ValueError(
            f"shardplan: plans take the place of FSDP2, and this {type(trainer_or_accelerator).__name__} does not "
            f"shard with it: {_HOW}"
        )
    prepare = accelerator._prepare_fsdp2

    @functools.wraps(prepare)
    def planned(*objects: Any) -> Any:
        models = [one for one in objects if isinstance(one, nn.Module)]
        if not models:
            return prepare(*objects)
        with marking(models[-1], **options):
            return prepare(*objects)

    accelerator._prepare_fsdp2 = planned
