# SPDX-License-Identifier: Apache-2.0
"""The rehearsed rank's place in the environment."""

from __future__ import annotations

import os

from .run import refuse, the_run

WORKER = "SHARDPLAN_REHEARSE_WORKER"  # the process that is the rank


def is_this_process() -> bool:
    """Whether this process is the rank: a fork of it (a data loader's worker) is not."""
    return os.environ.get(WORKER) == str(os.getpid())


def environment_of(world: int, local_world: int) -> dict[str, str]:
    """The variables that torchrun sets for the rehearsed rank. Refuses a rank that the job does not have."""
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


def hand_over() -> None:
    """The next program of this process, or a child of it, is the rank."""
    os.environ.pop(WORKER, None)
