# SPDX-License-Identifier: Apache-2.0
"""What the host's thread takes to issue one thing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from shardplan.calibrate.timing import Machine


class _Chain(nn.Module):
    """Linear layers so small that only issuing them counts."""

    def __init__(self, device: torch.device, depth: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, device=device) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def costs(machine: Machine, full: bool) -> Iterator[dict]:
    device = machine.device
    repeats = 50 if full else 5
    x = torch.randn(8, 8, device=device)
    out = torch.empty_like(x)
    yield {"what": "kernel", **machine.host_ns(lambda: torch.add(x, x, out=out), repeats)}
    yield {"what": "allocate", **machine.host_ns(lambda: torch.empty(1 << 12, device=device), repeats)}
    if device.type == "cuda":
        event, stream = torch.cuda.Event(), torch.cuda.current_stream()
        yield {"what": "record", **machine.host_ns(lambda: event.record(stream), repeats)}
        yield {"what": "wait", **machine.host_ns(lambda: stream.wait_event(event), repeats)}
    sources = [torch.randn(64, device=device) for _ in range(8)]
    targets = [torch.empty_like(s) for s in sources]
    yield {"what": "foreach_copy", **machine.host_ns(lambda: torch._foreach_copy_(targets, sources), repeats)}

    depth = 32
    chain = _Chain(device, depth)
    operators = 2 * depth  # of a forward: addmm and relu; a backward has three for each two

    def forward_backward() -> None:
        chain(x).sum().backward()

    plain = machine.host_ns(forward_backward, max(2, repeats // 5))
    # Forward: addmm, relu. Backward: threshold, mm for the input, mm and sum for weight and bias, two accumulations.
    yield {"what": "operator", "operators": operators + 6 * depth, **{k: round(v / (operators + 6 * depth)) for k, v in plain.items()}}
    handles = []
    for layer in chain.layers:
        handles.append(layer.register_forward_pre_hook(lambda module, args: None))
        handles.append(layer.register_forward_hook(lambda module, args, result: None))
    hooked = machine.host_ns(forward_backward, max(2, repeats // 5))
    for handle in handles:
        handle.remove()
    yield {"what": "hook", "hooks": 2 * depth, "duration_ns": max(0, round((hooked["duration_ns"] - plain["duration_ns"]) / (2 * depth)))}
