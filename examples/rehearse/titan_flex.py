# SPDX-License-Identifier: Apache-2.0
"""Configurations of torchtitan's gpt_oss with flex attention: --module titan_flex --config gpt_oss_20b. Its own take
FlashAttention 3, a package beside torch."""

from torchtitan.models.gpt_oss import config_registry, model_registry
from torchtitan.trainer import Trainer


def gpt_oss_20b() -> Trainer.Config:
    config = config_registry.gpt_oss_20b()
    config.model_spec = model_registry("20b", attn_backend="flex")
    return config


def gpt_oss_120b() -> Trainer.Config:
    config = config_registry.gpt_oss_120b()
    config.model_spec = model_registry("120b", attn_backend="flex")
    return config
