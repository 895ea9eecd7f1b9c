# SPDX-License-Identifier: Apache-2.0
"""torchtitan: its trainer, whose models train by plans.

    torchrun --nproc_per_node 8 -m shardplan.integrations.torchtitan --module llama3 --config llama3_8b

takes the arguments of `torchtitan.train`. torchtitan's `parallelize_fn` calls fully_shard: these calls mark units, and
the one for the whole model is `shardplan.torch.auto`. So units, meshes, dtypes and setters are torchtitan's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch.distributed.fsdp
import torch.nn as nn

import shardplan.torch as sp
from shardplan.tracer.sharding_calls import replaced_everywhere


def use_plans(config: Any, **options: Any) -> None:
    """From now on a trainer of this configuration trains by plans instead of FSDP2.

    config: torchtitan's Trainer.Config. ValueError for one without a model, or with pipeline parallelism.
    options: what shardplan.torch.auto takes besides fully_shard's arguments: policy, budget, allow, cluster, plans, ...
    """
    spec = getattr(config, "model_spec", None)
    if spec is None:
        raise ValueError(f"shardplan: a Trainer.Config of torchtitan with a model, not {type(config).__name__}")
    if config.parallelism.pipeline_parallel_degree > 1:
        raise ValueError(
            "shardplan: pipeline parallelism is in no plan (found parallelism.pipeline_parallel_degree "
            f"{config.parallelism.pipeline_parallel_degree}, expected 1)"
        )
    parallelize = spec.parallelize_fn

    @functools.wraps(parallelize)
    def planned(model: nn.Module, **arguments: Any) -> nn.Module:
        with _marking(model, options):
            return parallelize(model, **arguments)

    config.model_spec = dataclasses.replace(spec, parallelize_fn=planned)


@contextlib.contextmanager
def _marking(root: nn.Module, options: dict[str, Any]) -> Iterator[None]:
    def shard(module: nn.Module | list[nn.Module], **arguments: Any) -> nn.Module | list[nn.Module]:
        sp.unit(module, **arguments)
        if isinstance(module, nn.Module) and any(inner is root for inner in module.modules()):
            # The trainer calls to_empty() and its own initialization behind it.
            sp.auto(module, initialize=lambda _: None, **options)
        return module

    with replaced_everywhere({torch.distributed.fsdp.fully_shard: shard}):
        yield


def main() -> None:
    """torchtitan.train's."""
    import torchtitan.train
    from torchtitan.config.manager import ConfigManager

    parse = ConfigManager.parse_args

    @functools.wraps(parse)
    def parse_args(self: Any, *arguments: Any, **more: Any) -> Any:
        config = parse(self, *arguments, **more)
        use_plans(config)
        return config

    ConfigManager.parse_args = parse_args
    torchtitan.train.main()


if __name__ == "__main__":
    main()
