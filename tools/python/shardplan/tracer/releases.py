# SPDX-License-Identifier: Apache-2.0
"""Moments at which the model's Python lets go of tensors that autograd keeps.

A storage that autograd saves lives until the backward, so a recording does not see when nobody else holds it any more.
Activation checkpointing saves nothing in the first forward: there the storage dies when its last name does, a local
variable of the model's own code among them. So the forwards are recorded once more with hooks that keep nothing, and
the deaths that only that recording has are `release` events of the first.
"""

from __future__ import annotations

import contextlib

import torch


def kept_by_autograd(kept: bool):
    """A context in which autograd keeps what it saves, or nothing at all (then there is no backward)."""
    if kept:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _no_backward)


def _no_backward(_):
    raise RuntimeError("this forward keeps nothing for a backward")


def _gaps(events: list) -> tuple[list, list[list]]:
    """The events without deaths, and the deaths before the first of them, between each two and behind the last."""
    others, gaps = [], [[]]
    for event in events:
        if event[0] == "-":
            gaps[-1].append(event[1])
        else:
            others.append(event)
            gaps.append([])
    return others, gaps


def mark(forwards: list[dict], unkept: list[dict]) -> None:
    """Puts the releases into `forwards`; `unkept` are the same forwards with nothing kept. Nothing is marked where the
    two do not run alike (a model that does something else when it is called again)."""
    same: dict[int, int] = {}  # storages of `unkept`, as `forwards` call them
    marked = []
    for forward, other in zip(forwards, unkept):
        events = _with_releases(forward["events"], other["events"], same)
        if events is None:
            return
        marked.append(events)
    for forward, events in zip(forwards, marked):
        forward["events"] = events


def _with_releases(events: list, other: list, same: dict[int, int]) -> list | None:
    others, gaps = _gaps(events)
    again, more = _gaps(other)
    if [_shape(event) for event in others] != [_shape(event) for event in again]:
        return None
    born = {event[1] for event in others if event[0] == "+"}
    result: list = []
    for index, (gap, wider) in enumerate(zip(gaps, more)):
        here = [same[storage] for storage in wider if storage in same]
        if not set(gap) <= set(here):
            return None
        result += [
            ["-" if storage in gap else "release", storage] for storage in here if storage in gap or storage in born
        ]
        if index < len(others):
            if others[index][0] == "+":
                same[again[index][1]] = others[index][1]
            result.append(others[index])
    return result


def _shape(event: list) -> tuple:
    """The part of an event that is the same in both recordings: anything but the numbers of storages, and the roles
    that follow from deaths."""
    if event[0] == "+":
        return "+", event[2], event[4]
    if event[0] == "wait":
        return ("wait",)
    return tuple(event[:8]) if event[0] == "op" else tuple(event[:2])
