# SPDX-License-Identifier: Apache-2.0
"""Collectives of a recording: the details of their events, and where they are waited for.

torch.distributed's own have a Work that is waited for. A functional collective is waited for by wait_tensor on its
result, which the first operator that uses the result calls. Under a FakeTensorMode torch calls it at once, because it
takes the mode for a compiler.

A collective that is waited for before anything else happens is synchronous: its stream runs nothing beside it. Frees in
between do not count, since a free waits for nobody.
"""

from __future__ import annotations

import contextlib
import sys
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from shardplan.tracer import collectives
from shardplan.tracer.collectives import MILLION, CollectiveProblem
from shardplan.tracer.communicators import Communicators

# Methods of a Work. Who polls it goes on when it is over.
_WAITS = {"wait", "synchronize", "block_current_stream", "is_completed"}


@dataclass
class _Issued:
    event: list  # the last element has the details
    waited: bool = False
    wait: list | None = None  # its event


class Exchanges:
    def __init__(self, communicators: Communicators):
        self.communicators = communicators
        self._issued: list[_Issued] = []  # those that may be asynchronous
        # By the id of a Work, which is kept so that it stays the same Python object.
        self._by_work: dict[int, tuple[object, list[_Issued]]] = {}
        self._by_storage: dict[int, _Issued] = {}  # by the address of a functional collective's result
        self._batches: list[list[dict]] = []  # details of the collectives that are issued as one group
        self._open: list[dict] | None = None  # the last of them
        self._open_while: object = None  # this code runs; None: until end_batch
        self._coalescing: list[_Issued] | None = None

    # ---- issued ----

    def details(self, func, kind: str, args: tuple, kwargs: dict, out) -> dict | None:
        """The last element of the collective's event; None: one rank alone takes part, so it is a copy. Raises
        CollectiveProblem."""
        group = collectives.group_of(func, args, kwargs)
        members, rank = group.size(), group.rank()
        if members == 1:
            return None
        details = {
            "kind": kind,
            "communicator": self.communicators.of_group(group, kind == "all_to_all"),
            "size_bytes": collectives.size_bytes(func, kind, args, kwargs, out, members),
        }
        if kind in ("send", "recv"):
            if (peer := collectives.peer_of(func, args, kwargs)) is None:
                raise CollectiveProblem("a recv from any rank: a trace says from whom (recv(..., src=RANK))")
            details["peer"] = (peer - rank) % members
        if (batch := self._batch_now()) is not None:
            batch.append(details)
        if kind == "all_to_all" and (splits := collectives.splits_of(func, args, kwargs)) is not None:
            busiest = collectives.check_splits(splits, members, rank)
            if busiest != MILLION:
                details["busiest_ppm"] = busiest
        return details

    def parts_of_batch(self, func, args: tuple, kwargs: dict) -> list[tuple[torch.Tensor, dict | None]]:
        """The tensor and the details of each transfer of `collectives.BATCH`, which is one operator."""
        group = collectives.group_of(func, args, kwargs)
        kinds, peers, _, tensors = args[:4]
        if group.size() == 1:
            return [(tensor, None) for tensor in tensors]
        communicator = self.communicators.of_group(group, False)
        self._batches.append(
            [
                {
                    "kind": {"isend": "send", "irecv": "recv"}[kind],
                    "communicator": communicator,
                    "size_bytes": tensor.numel() * tensor.element_size(),
                    "peer": (peer - group.rank()) % group.size(),
                }
                for kind, peer, tensor in zip(kinds, peers, tensors)
            ]
        )
        return list(zip(tensors, self._batches[-1]))

    def issued(self, func, event: list, args: tuple, kwargs: dict, out) -> None:
        """`event` has its details, and is the last one so far."""
        if collectives.is_over_at_once(func, args, kwargs):
            return
        issued = _Issued(event)
        self._issued.append(issued)
        if self._coalescing is not None:
            self._coalescing.append(issued)
            return
        results = out if isinstance(out, (tuple, list)) else (out,)
        for result in results:
            if isinstance(result, torch.ScriptObject):
                self._remember(dist.Work.unbox(result), [issued])
            elif isinstance(result, torch.Tensor) and not func.namespace == "c10d":
                self._by_storage[result.untyped_storage()._cdata] = issued

    def _remember(self, work: object, issued: list[_Issued]) -> None:
        self._by_work[id(work)] = (work, issued)

    def with_future(self, get_future: Callable) -> Callable:
        """A Work's get_future: who waits for what it returns waits for the Work."""

        def run(work):
            future = get_future(work)
            self._remember(future, self._by_work.get(id(work), (None, []))[1])
            return future

        return run

    def forget(self, address: int) -> None:
        """The storage is gone: what is at its address is another one."""
        self._by_storage.pop(address, None)

    # ---- waited for ----

    def of_tensor(self, tensor: torch.Tensor) -> list[_Issued]:
        found = self._by_storage.get(tensor.untyped_storage()._cdata)
        return [found] if found is not None else []

    def of_work(self, work: object) -> list[_Issued]:
        return self._by_work.pop(id(work), (None, []))[1]

    def wait(self, issued: _Issued, events: list[list]) -> list | None:
        """The event to add behind `events`, which are those of the pass so far; None: there is none."""
        if issued.waited:
            return None
        issued.waited = True
        if self._is_next(issued, events):
            self._issued.remove(issued)
            return None
        issued.wait = ["wait", -1]
        return issued.wait

    def _is_next(self, issued: _Issued, events: list[list]) -> bool:
        """Whether nothing has happened since, but frees and the rest of its group."""
        group = next((b for b in self._batches if any(d is issued.event[-1] for d in b)), ())
        for event in reversed(events):
            if event is issued.event:
                return True
            if event[0] != "-" and not any(event[-1] is details for details in group):
                return False
        return False

    def end(self) -> None:
        """The recording is over: what is asynchronous gets its number, and so do groups of several."""
        for number, batch in enumerate(batch for batch in self._batches if len(batch) > 1):
            for details in batch:
                details["batch"] = number
        for number, issued in enumerate(self._issued):
            issued.event[-1]["work"] = number
            if issued.wait is not None:
                issued.wait[1] = number

    # ---- issued as one group ----

    def _batch_now(self) -> list[dict] | None:
        if self._open is not None and self._open_while is not None and not _is_running(self._open_while):
            self._open = None
        return self._open

    def begin_batch(self, code: object) -> None:
        """Until `code` is left, all collectives are of one group."""
        self._open, self._open_while = [], code
        self._batches.append(self._open)

    def begin_coalescing(self) -> None:
        self.begin_batch(None)
        self._coalescing = []

    def end_coalescing(self, work: object) -> None:
        if self._coalescing is not None:
            self._remember(work, self._coalescing)
        self._open = self._coalescing = None


def _is_running(code: object) -> bool:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def watched(exchanges: Exchanges, waited: Callable[[list[_Issued]], None]) -> Iterator[None]:
    """Inside, `waited` is told of the collectives whose Work is waited for, and collectives that one call issues as a
    group are known as such."""
    if not dist.is_available() or not dist.is_initialized():
        yield
        return
    from torch.distributed import distributed_c10d

    with contextlib.ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.object(functional_collectives(), "_are_we_tracing", _is_compiling))

        def patch(owner: object, name: str, before: Callable = _nothing, after: Callable = _nothing) -> None:
            original = owner.__dict__[name]

            def run(*args, **kwargs):
                before(*args)
                result = original(*args, **kwargs)
                after(result)
                return result

            setattr(owner, name, run)
            stack.callback(setattr, owner, name, original)

        for kind in _kinds_of_work():
            for name in _WAITS & kind.__dict__.keys():
                patch(kind, name, lambda work, *_: waited(exchanges.of_work(work)))
            if "get_future" in kind.__dict__:
                original = kind.__dict__["get_future"]
                setattr(kind, "get_future", exchanges.with_future(original))
                stack.callback(setattr, kind, "get_future", original)
        patch(torch._C.Future, "wait", lambda future, *_: waited(exchanges.of_work(future)))
        code = distributed_c10d.batch_isend_irecv.__code__
        patch(distributed_c10d, "_check_p2p_op_list", lambda *_: exchanges.begin_batch(code))
        patch(dist.ProcessGroup, "_start_coalescing", lambda *_: exchanges.begin_coalescing())
        patch(dist.ProcessGroup, "_end_coalescing", after=exchanges.end_coalescing)
        yield


def functional_collectives():
    from torch.distributed import _functional_collectives

    return _functional_collectives


def _is_compiling() -> bool:
    """functional._are_we_tracing, without its look at the FakeTensorMode."""
    included = torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher)
    return torch.compiler.is_dynamo_compiling() or included or get_proxy_mode() is not None


def _nothing(*_arguments) -> None:
    return None


def _kinds_of_work() -> list[type]:
    found, waiting = [], [dist.Work]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting += kind.__subclasses__()
    return found
