# SPDX-License-Identifier: Apache-2.0
"""Roles of a process that imports torch: a launcher, the rehearsed rank, or a child of it (a data loader's worker, a
compiler's)."""

from __future__ import annotations

import os
import sys
from types import ModuleType

from . import imports, launchers, worker
from .rank import WORKER, environment_of
from .run import refuse, the_run

_LAUNCHERS = {"torchrun", "accelerate", "deepspeed", "ds"}
_LAUNCHER_MODULES = {
    "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli", "deepspeed.launcher.runner", "deepspeed",
}


def take() -> None:
    """Called when torch is about to be imported."""
    run = the_run()
    imports.missing("torch", lambda: run.tell("no_torch", {"executable": sys.executable}))
    launcher = _is_launcher(sys.orig_argv)
    if not launcher and os.environ.get(WORKER) not in (None, str(os.getpid())):
        imports.behind("torch.distributed.distributed_c10d", _refuse_groups)
        return
    launchers.watch()
    if launcher:
        imports.behind("torch", lambda _torch: run.tell("torch", {"executable": sys.executable}))
        return
    _become_worker()
    worker.watch()


def _refuse_groups(c10d: ModuleType) -> None:
    """A process that the rank has started makes a group: its peers would wait for each other."""

    def init_process_group(*_arguments: object, **_settings: object) -> None:
        refuse(
            3,
            "the script starts its ranks as processes of its own, which cannot be rehearsed: start it by torchrun, or "
            "its ranks by torch.multiprocessing.spawn",
        )

    c10d.init_process_group = init_process_group


def take_in_fork(torch: ModuleType) -> None:
    """The same in a fork of a process that has imported torch (kept.py)."""
    if _is_launcher(sys.orig_argv):
        the_run().tell("torch", {"executable": sys.executable})
        return
    _become_worker()
    worker.begin(torch)


def _become_worker() -> None:
    run = the_run()
    os.environ[WORKER] = str(os.getpid())
    if "RANK" not in os.environ:
        os.environ["SHARDPLAN_DEVICE_COUNT"] = str(run.devices_alone)
        if run.gpus is not None and run.gpus > 1:
            os.environ.update(environment_of(run.gpus, run.gpus_per_node))


def _is_launcher(words: list[str]) -> bool:
    """words: the interpreter's, as `python -m torch.distributed.run` or `python /usr/bin/torchrun`."""
    i = 1
    while i < len(words):
        word = words[i]
        if word == "-m":
            return i + 1 < len(words) and words[i + 1] in _LAUNCHER_MODULES
        if word.startswith("-m") and len(word) > 2:
            return word[2:] in _LAUNCHER_MODULES
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            i += 2
        elif word.startswith("-"):
            i += 1
        else:
            return os.path.basename(word) in _LAUNCHERS
    return False
