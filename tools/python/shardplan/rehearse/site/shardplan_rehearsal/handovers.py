# SPDX-License-Identifier: Apache-2.0
"""One thread of Python learns of another that everything before a point is over. Starts and ends of threads,
queues, futures, events of `threading`."""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.thread
import queue
import threading
from collections.abc import Callable

_Tell = Callable[[int], None]


def patch(hand_over: _Tell, take_over: _Tell) -> None:
    def before(owner: type, name: str, tell: _Tell, key=id) -> None:
        own = getattr(owner, name)

        def method(self, *arguments, **settings):
            tell(key(self))
            return own(self, *arguments, **settings)

        setattr(owner, name, method)

    def behind(owner: type, name: str, tell: _Tell, key=id, when=lambda _self, _result: True) -> None:
        own = getattr(owner, name)

        def method(self, *arguments, **settings):
            result = own(self, *arguments, **settings)
            if when(self, result):
                tell(key(self))
            return result

        setattr(owner, name, method)

    before(threading.Thread, "start", hand_over)
    before(threading.Thread, "_bootstrap_inner", take_over)
    behind(threading.Thread, "run", hand_over, _end_of)  # subclasses that have a run of their own: see _bootstrap_inner
    behind(threading.Thread, "_bootstrap_inner", hand_over, _end_of)
    behind(threading.Thread, "join", take_over, _end_of, lambda thread, _result: not thread.is_alive())
    before(queue.Queue, "put", hand_over)
    behind(queue.Queue, "get", take_over)
    before(concurrent.futures.Future, "set_result", hand_over)
    before(concurrent.futures.Future, "set_exception", hand_over)
    behind(concurrent.futures.Future, "result", take_over)
    behind(concurrent.futures.Future, "exception", take_over)
    behind(concurrent.futures.thread._WorkItem, "__init__", hand_over)
    before(concurrent.futures.thread._WorkItem, "run", take_over)
    before(threading.Event, "set", hand_over)
    behind(threading.Event, "wait", take_over, when=lambda _event, happened: happened)
    behind(threading.Event, "is_set", take_over, when=lambda _event, happened: happened)


def _end_of(thread: threading.Thread) -> int:
    """The thread's end: its start is its own number, which is even."""
    return id(thread) + 1
