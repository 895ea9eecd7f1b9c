# SPDX-License-Identifier: Apache-2.0
"""torchtitan: its trainer, whose models train by plans.

    torchrun --nproc_per_node 8 -m shardplan.integrations.torchtitan --module llama3 --config llama3_8b

takes the arguments of `torchtitan.train`. torchtitan's `parallelize_fn` calls fully_shard: these calls mark units, and
the one for the whole model is `shardplan.torch.auto`. So units, meshes, dtypes and setters are torchtitan's.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import types
import unittest.mock
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

import shardplan.torch as sp
from shardplan.command import ArgumentParser, printable_name
from shardplan.integrations.marking import marking
from shardplan.terminal import complain
from shardplan.titan.configuration import configuration, why_not_imported
from shardplan.titan.unplanned import why_not_planned
from shardplan.tracer.errors import EXIT_BAD_INPUT, TracerError

_NAME = "shardplan.integrations.torchtitan"
_USAGE = "torchrun --nproc_per_node N -m shardplan.integrations.torchtitan --module NAME --config NAME [...]"
_DESCRIPTION = """\
torchtitan's trainer by plans. All arguments are those of torchtitan.train; with a module and a configuration --help
lists them."""


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
    try:
        _check(sys.argv[1:])
        train = _torchtitans_train()
        config = configuration(sys.argv[1:], _NAME)
        use_plans(config)
        with unittest.mock.patch.object(train.ConfigManager, "parse_args", lambda *_, **__: config):
            train.main()
    except (TracerError, sp.PlanError) as error:  # on all ranks, and the first one says it
        if int(os.environ.get("RANK", "0")) == 0:
            complain(_NAME, printable_name(str(error).removeprefix("shardplan: ")))
        raise SystemExit(error.exit_code if isinstance(error, TracerError) else EXIT_BAD_INPUT) from error


def _check(words: list[str]) -> None:
    parser = ArgumentParser(prog=_NAME, usage=_USAGE, description=_DESCRIPTION, add_help=False, allow_abbrev=False)
    parser.add_argument("--module", metavar="NAME", help="which models (llama3)")
    parser.add_argument("--config", metavar="NAME", help="a configuration of theirs (llama3_8b)")
    given, _ = parser.parse_known_args(words)
    if given.module and given.config:
        return
    if {"-h", "--help"} & set(words):
        parser.print_help()
        raise SystemExit(0)
    parser.error("--module and --config are required: --module llama3 --config llama3_debugmodel")


def _torchtitans_train() -> types.ModuleType:
    """Imported before a configuration is, which would not say which package is missing."""
    try:
        import torchtitan.train
    except ImportError as error:
        raise why_not_imported(error) from error
    return torchtitan.train


if __name__ == "__main__":
    main()
