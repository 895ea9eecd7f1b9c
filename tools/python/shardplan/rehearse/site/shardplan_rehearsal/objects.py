# SPDX-License-Identifier: Apache-2.0
"""Objects that one rank sends and others receive. Objects that this rank sends are recorded. Objects that it receives
come from a recording of the sender's own rehearsal, which the command makes first if there is none.

A message is known by its ranks, its sender, its kind, and how many of those came before it.
"""

from __future__ import annotations

import collections
import hashlib
import os
import pickle
from types import ModuleType

from .run import EXIT_NEEDS, stop, the_run

_counts: collections.Counter = collections.Counter()


def patch(c10d: ModuleType) -> None:
    broadcast, scatter, send = c10d.broadcast_object_list, c10d.scatter_object_list, c10d.send_object_list

    def broadcast_object_list(
        object_list: list,
        src: int | None = None,
        group: object = None,
        *arguments: object,
        group_src: int | None = None,
        **settings: object,
    ) -> None:
        if c10d._rank_not_in_group(group):
            return
        sender = _global_sender(c10d, group, src, group_src)
        name = _name(c10d, group, sender, "broadcast")
        if sender == c10d.get_rank():
            _record(name, list(object_list))
            return broadcast(object_list, src, group, *arguments, group_src=group_src, **settings)
        object_list[:] = _recorded(name, sender)

    def scatter_object_list(
        scatter_object_output_list: list,
        scatter_object_input_list: list | None = None,
        src: int | None = None,
        group: object = None,
        group_src: int | None = None,
        **_settings: object,
    ) -> None:
        if c10d._rank_not_in_group(group):
            return
        sender = _global_sender(c10d, group, src, group_src)
        name = _name(c10d, group, sender, "scatter")
        if sender == c10d.get_rank():
            _record(name, list(scatter_object_input_list))
            scatter_object_output_list[0] = scatter_object_input_list[c10d.get_rank(group)]
        else:
            scatter_object_output_list[0] = _recorded(name, sender)[c10d.get_rank(group)]

    def send_object_list(
        object_list: list,
        dst: int | None = None,
        group: object = None,
        *arguments: object,
        group_dst: int | None = None,
        **settings: object,
    ) -> None:
        receiver = dst if group_dst is None else c10d.get_global_rank(group or c10d.group.WORLD, group_dst)
        _record(_name(c10d, group, c10d.get_rank(), f"to-{receiver}"), list(object_list))
        return send(object_list, dst, group, *arguments, group_dst=group_dst, **settings)

    def recv_object_list(
        object_list: list,
        src: int | None = None,
        group: object = None,
        *_arguments: object,
        group_src: int | None = None,
        **_settings: object,
    ) -> int:
        if src is None and group_src is None:
            raise RuntimeError(
                "rehearsal: recv_object_list from any rank: peers are played, and none of them is known to send. Name "
                "the sender (src)"
            )
        sender = _global_sender(c10d, group, src, group_src)
        object_list[:] = _recorded(_name(c10d, group, sender, f"to-{c10d.get_rank()}"), sender)
        return sender

    for function in (broadcast_object_list, scatter_object_list, send_object_list, recv_object_list):
        setattr(c10d, function.__name__, function)


def _global_sender(c10d: ModuleType, group: object, src: int | None, group_src: int | None) -> int:
    if group_src is not None:
        return c10d.get_global_rank(group or c10d.group.WORLD, group_src)
    return src if src is not None else 0


def _name(c10d: ModuleType, group: object, sender: int, kind: str) -> str:
    ranks = c10d.get_process_group_ranks(group)
    place = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    key = f"{place}-{sender}-{kind}"
    _counts[key] += 1
    return f"{key}-{_counts[key]}"


def _record(name: str, objects: list) -> None:
    run = the_run()
    path = os.path.join(run.messages, name)
    if not os.path.exists(path):
        with open(path + ".part", "wb") as file:
            pickle.dump(objects, file)
        os.replace(path + ".part", path)
    if run.until == name:
        run.tell("sent", {"message": name})
        stop(0)


def _recorded(name: str, sender: int) -> list:
    run = the_run()
    try:
        with open(os.path.join(run.messages, name), "rb") as file:
            return pickle.load(file)
    except FileNotFoundError:
        run.tell("needs", {"rank": sender, "message": name})
        stop(EXIT_NEEDS)
