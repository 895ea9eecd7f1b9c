# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several local ranks and collects what each returns or raises. On the CPU with gloo; with
SHARDPLAN_TEST_DEVICE=cuda with NCCL, all ranks on one GPU where there are not enough (docs/internals/gpu.md)."""

from __future__ import annotations

import datetime
import gc
import os
import pathlib
import pickle
import socket
import sys
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))  # of programs that pytest does not start

import warm  # noqa: E402


DEVICE = os.environ.get("SHARDPLAN_TEST_DEVICE", "cpu")


def _use_device(rank: int) -> str:
    """The backend of the process group."""
    if DEVICE == "cpu":
        return "gloo"
    os.environ["NCCL_HOSTID"] = f"shardplan-{rank}"  # several ranks on one GPU: NCCL takes them for hosts
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return "cpu:gloo,cuda:nccl"


def _entry(
    rank: int, ranks: int, folder: str, function: Callable, arguments: tuple, timeout_s: float, environment: dict
) -> None:
    warm.begin(environment)
    torch.set_num_threads(1)
    dist.init_process_group(
        _use_device(rank),
        init_method="env://" if "MASTER_PORT" in environment else f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    try:
        outcome = ("returned", function(*arguments))
    except Exception as error:  # handed to the test, which judges it
        outcome = ("raised", f"{type(error).__name__}: {error}", traceback.format_exc())
    pathlib.Path(folder, f"rank{rank}").write_bytes(pickle.dumps(outcome))
    if outcome[0] == "raised" or "MASTER_PORT" in environment:
        # No orderly shutdown: the others may be in a collective, and torch's NCCL process group waits for a store that
        # is stopped when it goes.
        os._exit(0)
    gc.collect()  # models hold the process groups, whose threads must end before the interpreter does
    dist.destroy_process_group()


def _served_by_rank_0() -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


def run_on_ranks(
    ranks: int, folder: pathlib.Path, function: Callable, *arguments, timeout_s: float = 300, stops: int | None = None
) -> list:
    """function(*arguments) on every rank -> per rank ("returned", value), ("raised", message, traceback), or None for
    a process that died without a word.

    timeout_s: of the process group. It ends ranks that wait for one that is lost, and no test waits for it: on a loaded
    machine a rank may be minutes behind.
    stops: a rank that stops itself, and is killed when the others have ended. The store is then a TCPStore of rank 0's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warm.server()
    served = {} if stops is None else _served_by_rank_0()
    context = mp.start_processes(
        _entry,
        (ranks, str(folder), function, arguments, timeout_s, {**os.environ, **served}),
        nprocs=ranks,
        join=False,
        start_method="forkserver",
    )
    for rank, process in enumerate(context.processes):
        if rank != stops:
            process.join()
    if stops is not None:
        context.processes[stops].kill()
    outcomes = []
    for rank in range(ranks):
        result = folder / f"rank{rank}"
        outcomes.append(pickle.loads(result.read_bytes()) if result.exists() else None)
    return outcomes
