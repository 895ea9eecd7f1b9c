# SPDX-License-Identifier: Apache-2.0
"""What a process that imports torch is: a launcher, the rehearsed rank, or a child of it (a data loader's worker, a compiler's)."""

from __future__ import annotations

import os
import sys

from . import imports
from .run import refuse, the_run

_WORKER = "SHARDPLAN_REHEARSE_WORKER"  # the process that is the rank
_LAUNCHERS = {"torchrun", "accelerate", "deepspeed", "ds"}
_LAUNCHER_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "accelerate.commands.accelerate_cli", "deepspeed.launcher.runner", "deepspeed"}


def take() -> None:
    """Called when torch is about to be imported."""
    run = the_run()
    imports.missing("torch", lambda: run.tell("no_torch", {"executable": sys.executable}))
    launcher = _is_launcher(sys.orig_argv)
    if not launcher and os.environ.get(_WORKER) not in (None, str(os.getpid())):
        return
    from . import launchers

    launchers.watch()
    if launcher:
        imports.behind("torch", lambda _torch: run.tell("torch", {"executable": sys.executable}))
        return
    os.environ[_WORKER] = str(os.getpid())
    if "RANK" not in os.environ and (run.gpus or 1) > 1:
        become(environment_of(run.gpus or 1, min(run.gpus_per_node, run.gpus or 1)))
    from . import worker

    worker.watch()


def environment_of(world: int, local_world: int) -> dict[str, str]:
    """What torchrun sets for the rehearsed rank. Refuses a rank that the job does not have."""
    run = the_run()
    if run.rank >= world:
        refuse(2, f"--rank {run.rank}: the job has {world} ranks (found {run.rank}, expected 0 to {world - 1})")
    local_rank, node = run.rank % local_world, run.rank // local_world
    return {
        "RANK": str(run.rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(local_world),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(-(-world // local_world)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(run.rank),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": os.environ.get("MASTER_PORT", "29500"),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "rehearsal",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def become(environment: dict[str, str]) -> None:
    os.environ.update(environment)


def hand_over() -> None:
    """The next program of this process, or a child of it, is the rank."""
    os.environ.pop(_WORKER, None)


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
