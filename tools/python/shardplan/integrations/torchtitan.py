# SPDX-License-Identifier: Apache-2.0
"""torchtitan: its trainer, whose models train by plans.

    torchrun --nproc_per_node 8 -m shardplan.integrations.torchtitan --module llama3 --config llama3_8b

takes the arguments of `torchtitan.train`. torchtitan's `parallelize_fn` calls fully_shard: these calls mark units, and
the one for the whole model is `shardplan.torch.auto`. So units, meshes, dtypes and setters are torchtitan's.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

import shardplan.torch as sp
from shardplan.integrations.marking import marking
from shardplan.terminal import complain
from shardplan.titan.unplanned import why_not_planned

_EXIT_USAGE = 2


def use_plans(config: Any, **options: Any) -> None:
    """From now on a trainer of this configuration trains by plans instead of FSDP2.

    config: torchtitan's Trainer.Config. ValueError for one without a model, or with pipeline parallelism. The trainer
    raises PlanError where torchtitan does not shard with FSDP2.
    options: what shardplan.torch.auto takes besides fully_shard's arguments.
    """
    spec = getattr(config, "model_spec", None)
    if spec is None:
        raise ValueError(f"shardplan: a Trainer.Config of torchtitan with a model, not {type(config).__name__}")
    if reason := why_not_planned(config):
        raise ValueError(f"shardplan: {reason}")
    parallelize = spec.parallelize_fn

    @functools.wraps(parallelize)
    def planned(model: nn.Module, **arguments: Any) -> nn.Module:
        # The trainer calls to_empty() and its own initialization behind it.
        with marking(model, **{"initialize": lambda _: None, **options}):
            made = parallelize(model, **arguments)
        if not isinstance(made, FSDPModule):
            raise sp.PlanError("torchtitan does not call fully_shard for this job, whose place plans take")
        return made

    config.model_spec = dataclasses.replace(spec, parallelize_fn=planned)


def main() -> None:
    """torchtitan.train's."""
    import torchtitan.train
    from torchtitan.config.manager import ConfigManager

    parse = ConfigManager.parse_args

    @functools.wraps(parse)
    def parse_args(self: Any, *arguments: Any, **more: Any) -> Any:
        config = parse(self, *arguments, **more)
        try:
            use_plans(config)
        except ValueError as error:
            complain("shardplan.integrations.torchtitan", str(error).removeprefix("shardplan: "))
            raise SystemExit(_EXIT_USAGE) from error
        return config

    ConfigManager.parse_args = parse_args
    torchtitan.train.main()


if __name__ == "__main__":
    main()
