# SPDX-License-Identifier: Apache-2.0
"""The gradients that a model with frozen parameters would need if all of its parameters required them.

FSDP1 makes one tensor of a unit's parameters. If one trains, autograd treats all of them as training, and the backward
runs through modules that it does not reach in the plain model. A second recording says how far that can go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


def has_frozen_parameters(module: nn.Module) -> bool:
    return any(not p.requires_grad and p.dtype.is_floating_point for p in module.parameters())


@contextlib.contextmanager
def everything_trains(module: nn.Module) -> Iterator[None]:
    frozen = [p for p in module.parameters() if not p.requires_grad and p.dtype.is_floating_point]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def mark_tensors(fields: dict, trained: dict) -> None:
    """Adds to each tensor of `fields` that needs no gradient what `trained`, the recording of the same in which
    everything trains, says."""
    pairs = list(zip(fields["forwards"], trained["forwards"]))
    if any(_shapes(own) != _shapes(other) for own, other in pairs):
        return  # the model does something else then
    in_loss = _tensors_in_loss(trained)
    for number, (own, other) in enumerate(pairs):
        for tensor_id, (tensor, then) in enumerate(zip(own["tensors"], other["tensors"])):
            if tensor.get("requires_grad"):
                continue
            tensor["may_require_grad"] = then.get("requires_grad", False)
            if (used := in_loss.get((number, tensor_id))) is not None:
                tensor["in_loss"] = used


def _shapes(forward: dict) -> list:
    return [tensor["shape"] for tensor in forward["tensors"]]


def _tensors_in_loss(fields: dict) -> dict[tuple[int, int], bool]:
    """By forward and tensor, of the outputs of modules that need a gradient: whether they get one. Forwards without a
    backward are not in it."""
    outputs: dict[tuple[int, int, int, int], int] = {}  # (forward, module, occurrence, index) -> tensor
    for number, forward in enumerate(fields["forwards"]):
        entered: dict[int, int] = {}
        open_calls: list[int] = []
        for event in forward["events"]:
            if event[0] == "enter":
                open_calls.append(entered.setdefault(event[1], 0))
                entered[event[1]] += 1
            elif event[0] == "exit":
                occurrence = open_calls.pop()
                for index, tensor_id in enumerate(event[2]):
                    if forward["tensors"][tensor_id].get("requires_grad"):
                        outputs[(number, event[1], occurrence, index)] = tensor_id
    used: dict[tuple[int, int], bool] = {}
    for backward in fields["backwards"]:
        covered = backward["forwards"]
        ready = {(covered[e[4]], e[1], e[3], e[2]) for e in backward["events"] if e[0] == "grad_ready"}
        for output, tensor_id in outputs.items():
            if output[0] in covered:
                key = (output[0], tensor_id)
                used[key] = used.get(key, False) or output in ready
    return used
