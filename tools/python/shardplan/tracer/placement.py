# SPDX-License-Identifier: Apache-2.0
"""Moments at which a module's input gradients are done, put into a backward that was recorded without the functions
that tell them.

[Note: two recordings] An identity function on a module's inputs adds up what the module's own uses of an input send
back, before the caller's other uses join. Without it the autograd engine adds all of them up as they come. An input
that is used twice inside a module and again outside then has a different sum, and sometimes one temporary more. The
unsharded step has no such functions, and FSDP has them on its units only. So a second recording without them gives
operators and storages, and the first only the moments. Everything but the sums happens in the same order in both: the
moments are placed by it.
"""

from __future__ import annotations

import torch

_SUMS = ("aten.add", "aten.add_")


def sums_are_regrouped(loss: torch.Tensor, identity_name: str) -> bool:
    """Whether an identity of several incoming gradients passes its sum on to where other gradients arrive as well."""
    incoming: dict[tuple, int] = {}
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for slot in node.next_functions:
            incoming[slot] = incoming.get(slot, 0) + 1
            waiting.append(slot[0])
    for node in seen:
        if node.name() != identity_name:
            continue
        for index, target in enumerate(node.next_functions):  # slot i goes on along edge i
            if incoming.get((node, index), 0) < 2:
                continue
            while target[0] is not None and target[0].name() == identity_name and incoming.get(target, 0) < 2:
                target = target[0].next_functions[target[1]]
            if incoming.get(target, 0) > 1:
                return True
    return False


def _anchor(event: list):
    """The part of an event that is the same in both recordings: anything but storages, sums and the moments themselves.
    Without storage ids. A moment between a collective and its wait makes it asynchronous, so neither the collective's
    details nor waits are the same."""
    if event[0] == "op" and event[1] not in _SUMS:
        return tuple(event[1:8])
    if event[0] == "param_grad":
        return tuple(event[:2])
    if event[0] in ("grad_ready", "recompute_enter", "recompute_exit"):
        return tuple(event)
    return None


def _gaps(events: list) -> tuple[list, list[list]]:
    """Anchors, and the events before the first, between each two and after the last."""
    anchors, gaps = [], [[]]
    for event in events:
        key = _anchor(event)
        if key is None:
            gaps[-1].append(event)
        else:
            anchors.append(key)
            gaps.append([])
    return anchors, gaps


def _is_counted(event: list) -> bool:
    return event[0] == "wait" or event[0] == "op" and event[1] in _SUMS


def _merge_gap(plain: list, marked: list) -> list:
    """The moments of a gap after as many sums and waits for collectives, and after the frees that follow those."""
    result, position, sums, wanted = [], 0, 0, 0
    for event in marked:
        if _is_counted(event):
            wanted += 1
        elif event[0] == "inputs_done":
            while position < len(plain) and (plain[position][0] == "-" or sums < wanted):
                sums += _is_counted(plain[position])
                result.append(plain[position])
                position += 1
            result.append(event)
    return result + plain[position:]


def with_inputs_done(plain: list, marked: list) -> list | None:
    """The events of `plain` with the inputs_done events of `marked` among them; None when the two do not run alike."""
    anchors, gaps = _gaps(plain)
    other_anchors, other_gaps = _gaps(marked)
    if anchors != other_anchors:
        return None
    anchor_events = iter([event for event in plain if _anchor(event) is not None])
    result = _merge_gap(gaps[0], other_gaps[0])
    for gap, other in zip(gaps[1:], other_gaps[1:]):
        result.append(next(anchor_events))
        result.extend(_merge_gap(gap, other))
    return result
