# SPDX-License-Identifier: Apache-2.0
"""Builders that have a framework shard their model, for `shardplan trace framework_builders:NAME --strategy FILE`:
FRAMEWORK__MODEL__VARIANT, models and frameworks of framework_units.py."""

import os

import torch
import torch.distributed as dist
from framework_units import MODELS
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS = 2
# Arguments of FullyShardedDataParallelPlugin, or of the Trainer's fsdp_config.
VARIANTS = {
    "plain": {}, "broadcast": {"cpu_ram_efficient_loading": True}, "checkpoints": {"activation_checkpointing": True},
    "offload": {"cpu_offload": True},
}


def join():
    """The variables of a launcher, and a process group."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost",
                   "MASTER_PORT": "29500"}
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)


def with_accelerate(model, options):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", mixed_precision_policy="bf16", **options
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters()))[0]


def with_trainer(model, options):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="unused", fsdp=True, fsdp_config={"fsdp_version": 2, **options}, bf16=True, report_to=[]
    )
    trainer = Trainer(model=model, args=arguments)
    trainer.create_optimizer()
    return trainer.accelerator.prepare(trainer.model, trainer.optimizer)[0]


def __getattr__(name):
    framework, model, variant = name.split("__")

    def build(batch, seq):
        join()
        prepare = {"accelerate": with_accelerate, "trainer": with_trainer}[framework]
        tokens = torch.zeros(batch, seq, dtype=torch.long)
        return prepare(MODELS[model](), VARIANTS[variant]), {"input_ids": tokens, "labels": tokens}

    return build
