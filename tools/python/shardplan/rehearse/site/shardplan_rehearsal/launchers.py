# SPDX-License-Identifier: Apache-2.0
"""Launchers start the rehearsed rank alone: torchrun and what is made of it (accelerate), deepspeed,
torch.multiprocessing.spawn."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType

from . import imports
from .rank import environment_of, hand_over
from .run import refuse, the_run


def watch() -> None:
    imports.behind("torch.distributed.launcher.api", _patch_elastic)
    imports.behind("torch.multiprocessing.spawn", _patch_spawn)
    imports.behind("deepspeed.launcher.runner", _patch_deepspeed)


def _sizes(world: int, local_world: int) -> tuple[int, int]:
    """Ranks and ranks of a node: those of the command line, where it says so, before the launcher's own."""
    run = the_run()
    return (run.gpus, run.gpus_per_node) if run.gpus else (world, local_world)


def _replace_process(words: list[str]) -> None:
    hand_over()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(words[0], words)
    except OSError as error:
        refuse(
            3, f"the launcher starts {words[0]}, which cannot be run: {error.strerror} (expected a program on the PATH)"
        )


def _patch_elastic(api: ModuleType) -> None:
    def launch_agent(config, entrypoint: Callable | str | None, args: list, **_settings: object) -> dict[int, object]:
        from torch.distributed.elastic.utils import macros

        world, local_world = _sizes(config.max_nodes * config.nproc_per_node, config.nproc_per_node)
        environment = environment_of(world, local_world)
        os.environ.update(
            {**environment, "ROLE_NAME": config.role or "default", "TORCHELASTIC_RUN_ID": config.run_id or "rehearsal"}
        )
        local_rank = int(environment["LOCAL_RANK"])
        words = macros.substitute(list(args), str(local_rank))
        if isinstance(entrypoint, str):
            _replace_process([entrypoint, *map(str, words)])
        return {local_rank: entrypoint(*words)}

    api.launch_agent = launch_agent


def _patch_spawn(module: ModuleType) -> None:
    def start_processes(
        fn: Callable,
        args: tuple = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
        **_settings: object,
    ) -> object:
        run = the_run()
        if run.gpus is None and run.rank >= nprocs:
            refuse(
                2,
                f"--rank {run.rank}: the script starts {nprocs} processes (found {run.rank}, expected 0 to "
                f"{nprocs - 1})",
            )
        fn(run.rank % nprocs, *args)
        return None if join else _Ended()

    def spawn(
        fn: Callable,
        args: tuple = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> object:
        return start_processes(fn, args, nprocs, join, daemon, start_method)

    module.start_processes, module.spawn = start_processes, spawn
    package = sys.modules.get("torch.multiprocessing")
    for name in ("start_processes", "spawn"):
        if package is not None and callable(getattr(package, name, None)):
            setattr(package, name, getattr(module, name))


class _Ended:
    """The context of processes that have ended well."""

    def join(self, timeout: float | None = None, **_settings: object) -> bool:
        return True

    def pids(self) -> list[int]:
        return []


def _patch_deepspeed(runner: ModuleType) -> None:
    def main(args: list[str] | None = None) -> None:
        import torch

        options = runner.parse_args(args)
        per_node = options.num_gpus if options.num_gpus > 0 else torch.cuda.device_count()
        world, local_world = _sizes(per_node * max(1, options.num_nodes), per_node)
        environment = environment_of(world, local_world)
        os.environ.update(environment)
        words = [] if options.no_python else [sys.executable, "-u", *(["-m"] if options.module else [])]
        words.append(options.user_script)
        if not options.no_local_rank:
            words.append(f"--local_rank={environment['LOCAL_RANK']}")
        _replace_process([*words, *options.user_args])

    runner.main = main
