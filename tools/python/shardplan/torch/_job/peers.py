# SPDX-License-Identifier: Apache-2.0
"""The other ranks: how long they are waited for, and which of them are alive."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from .arguments import PlanError, default_timeout_s
from .native import native
from .store import job_store, served_by_agent

T = TypeVar("T")

_peers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of a default group
_watching: weakref.WeakSet = weakref.WeakSet()  # all of them; one may outlive its group


def _store_rank(store: dist.Store) -> int | None:
    """Who serves the store: with env:// it is rank 0, unless torchrun's agent does."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    from_environment = isinstance(store, dist.TCPStore) and os.environ.get("MASTER_PORT") == str(store.port)
    return 0 if from_environment and not served_by_agent() else None


def peers() -> native.Peers | None:
    """The peers of the default group; None if there are no processes to watch. The first call begins to watch."""
    if not dist.is_initialized() or dist.get_backend() == "fake" or dist.get_world_size() < 2:
        return None
    group = dist.distributed_c10d._get_default_group()
    if group not in _peers:
        if not _peers:
            atexit.register(_leave)
            multiprocessing.util.Finalize(None, _leave, exitpriority=0)  # its processes do not run atexit
        store = job_store(default_timeout_s())
        _peers[group] = native.Peers(
            dist.PrefixStore("peers", store), dist.get_rank(), dist.get_world_size(), _store_rank(store)
        )
        _watching.add(_peers[group])
        # A runtime may hold the peers longer than the group lives: whoever destroys the group leaves in good order.
        weakref.finalize(group, _peers[group].leave)
    return _peers[group]


def _leave() -> None:
    """An interpreter that ends in good order has not died."""
    for watched in list(_watching):
        watched.leave()


def _gpu() -> int | None:
    """The thread's current one, once CUDA is in use."""
    return torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None


_LOOK_S = 0.05
_PATIENCE_S = 3.0


def connect(function: Callable[[], T], timeout_s: float) -> T:
    """function(), which makes process groups: PyTorch waits for other ranks there, through a store that may never
    answer.

    So it runs in a thread that is given up when time is up, or a rank has died. Raises PlanError, naming who did not
    arrive.
    """
    watched = peers()
    if watched is None:
        return function()
    result: list[T] = []
    failure: list[BaseException] = []
    devices = [_gpu()]  # each thread has its own; a device mesh may choose one

    def run() -> None:
        try:
            if devices[0] is not None:
                torch.cuda.set_device(devices[0])
            made = function()
            devices.append(_gpu())
            result.append(made)
        except BaseException as error:  # raised again where it was called
            failure.append(error)

    thread = threading.Thread(target=run, name="shardplan-connect", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout_s
    while thread.is_alive() and time.monotonic() < deadline and not watched.dead():
        thread.join(_LOOK_S)
    if result:
        if devices[-1] != devices[0]:
            torch.cuda.set_device(devices[-1])
        return result[0]
    if failure and (isinstance(failure[0], PlanError) or not isinstance(failure[0], RuntimeError)):
        raise failure[0]  # ours, or PyTorch's on how it is called: nobody is missing
    culprit = watched.culprit(_PATIENCE_S if failure else _LOOK_S)
    if failure and not culprit:
        raise failure[0]
    watched.fail()
    why = str(failure[0]).splitlines()[0] if failure else f"no process group within {timeout_s:g} s"
    raise PlanError(f"the ranks could not connect: {culprit}{': ' if culprit else ''}{why}") from (failure or [None])[0]
