# SPDX-License-Identifier: Apache-2.0
"""The part of the default group's store that is this job's.

[Note: a store that outlives its ranks] torchrun's agent serves the store, and when it starts the ranks again the store
still has all keys of those before: who died, what they agreed on, which plan they took. Nothing that the environment
says differs between the two (restarts are counted by each node for itself). So the ranks draw lots: each of them leaves
a word of its own. Rank 0 answers every word with the name of what the ranks share from then on, until each has said
that it knows the name. A word of an earlier rank gets an answer, too, which nobody reads.
"""

from __future__ import annotations

import collections
import datetime
import os
import threading
import time
import uuid
import weakref
import zlib

import torch.distributed as dist

from .arguments import PlanError

_LOOK_S = 0.02

_stores: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of a default group
_exchanges: collections.Counter = collections.Counter()  # by their kind and the ranks that take part


def job_store(timeout_s: float) -> dist.Store:
    """The part of the default group's store. The first call waits for rank 0's, if torchrun's agent serves the
    store."""
    group = dist.distributed_c10d._get_default_group()
    if group not in _stores:
        store = dist.distributed_c10d._get_default_store()
        name = _name(store, timeout_s) if served_by_agent() and dist.get_world_size() > 1 else "job"
        _stores[group] = dist.PrefixStore(f"shardplan/{name}", store)
    return _stores[group]


def next_store(kind: str, ranks: list[int], timeout_s: float) -> dist.Store:
    """One for each exchange of a kind among these ranks, which count them alike."""
    _exchanges[kind, tuple(ranks)] += 1
    return dist.PrefixStore(
        f"{kind}/{zlib.crc32(repr(ranks).encode())}/{_exchanges[kind, tuple(ranks)]}", job_store(timeout_s)
    )


def served_by_agent() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _name(store: dist.Store, timeout_s: float) -> str:
    own = dist.PrefixStore("shardplan/names", store)
    if dist.get_rank() == 0:
        name = uuid.uuid4().hex
        ranks = range(1, dist.get_world_size())
        threading.Thread(
            target=_answer, args=(own.clone(), name, ranks, timeout_s), name="shardplan-names", daemon=True
        ).start()
        return name
    word = uuid.uuid4().hex
    own.set(f"word/{dist.get_rank()}", word)
    try:
        own.wait([f"answer/{word}"], datetime.timedelta(seconds=timeout_s))
    except dist.DistError:
        raise PlanError(f"the ranks could not connect: rank 0 did not arrive within {timeout_s:g} s") from None
    name = own.get(f"answer/{word}").decode()
    own.set(f"known/{name}/{dist.get_rank()}", "")
    return name


def _answer(own: dist.Store, name: str, ranks: range, timeout_s: float) -> None:
    """Rank 0's, in a thread and with a connection of its own: it ends when all ranks know the name."""
    until = time.monotonic() + timeout_s
    waiting, answered = set(ranks), {}
    try:
        while waiting and time.monotonic() < until:
            for rank in sorted(waiting):
                if own.check([f"known/{name}/{rank}"]):
                    waiting.remove(rank)
                elif own.check([f"word/{rank}"]) and (word := own.get(f"word/{rank}").decode()) != answered.get(rank):
                    own.set(f"answer/{word}", name)
                    answered[rank] = word
            time.sleep(_LOOK_S)
    except dist.DistError:
        pass  # the job is over
