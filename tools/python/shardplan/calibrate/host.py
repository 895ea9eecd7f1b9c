# SPDX-License-Identifier: Apache-2.0
"""Time for which the host's thread issues one thing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardplan.calibrate.timing import Machine


_ADAMW_OPERATORS = 8  # of a parameter, as docs/internals/simulator.md has them


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
    yield {
        "what": "operator",
        "operators": operators + 6 * depth,
        **{k: round(v / (operators + 6 * depth)) for k, v in plain.items()},
    }
    # On a module that does nothing else: hooks are a small part of a layer.
    nothing, hooks = nn.Identity(), 10
    bare = machine.host_ns(lambda: nothing(x), repeats)
    for _ in range(hooks):
        nothing.register_forward_pre_hook(lambda module, args: None)
    hooked = machine.host_ns(lambda: nothing(x), repeats)
    yield {
        "what": "hook", "hooks": hooks,
        "duration_ns": max(0, round((hooked["duration_ns"] - bare["duration_ns"]) / hooks)),
    }
    if device.type == "cpu" and dist.is_initialized():
        yield _optimizer_operator(machine, max(2, repeats // 5))


def _optimizer_operator(machine: Machine, repeats: int) -> dict:
    """One operator of an optimizer that loops over sharded parameters, as FSDP leaves them on CPU ranks: each goes
    through DTensor."""
    parameters = 16
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = [
        nn.Parameter(distribute_tensor(torch.randn(8 * dist.get_world_size(), 8), mesh, [Shard(0)]))
        for _ in range(parameters)
    ]
    for parameter in sharded:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(sharded, foreach=False)
    step = machine.host_ns(optimizer.step, repeats)
    operators = parameters * _ADAMW_OPERATORS
    return {"what": "optimizer_operator", "operators": operators, **{k: round(v / operators) for k, v in step.items()}}
