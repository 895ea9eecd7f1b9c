# SPDX-License-Identifier: Apache-2.0
"""torch.optim.Muon on FSDP2's parameters and Gloo ranks: what one optimizer.step() issues, allocates and frees.

Shares nothing with the tracer: a dispatch mode below DTensor sees real tensors.
"""

from __future__ import annotations

import os
import time
import traceback
import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TIMEOUT_SECONDS = 120
_KINDS = {
    "all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all", "broadcast": "broadcast",
}
# References to a result that is waited for: of the caller and of the call's arguments; of the tensor and of the
# storage's object.
_OF_A_RESULT = (2, 2)
_NO_KERNELS = frozenset(("aten.empty", "aten.empty_strided", "aten.new_empty", "aten.detach", "aten.alias"))


@dataclass(frozen=True)
class MuonCase:
    """One model of matrices. replicas: 1, or the outer dimension of HSDP."""

    name: str
    ranks: int
    shapes: tuple[tuple[int, int], ...]
    dtype: str = "float32"
    replicas: int = 1
    nesterov: bool = True
    ns_steps: int = 5

    @property
    def shards(self) -> int:
        return self.ranks // self.replicas

    def model(self) -> nn.Module:
        dtype = getattr(torch, self.dtype)
        return nn.ModuleList(nn.Linear(n, m, bias=False, dtype=dtype) for m, n in self.shapes)


@dataclass
class Recorded:
    """events: ["+", number, bytes], ["-", number], ["op", name, dtype], ["collective", kind, dtype, bytes, ranks],
    ["wait", number of the collective]. states: (name, shape of the rank's part, dtype) of each parameter."""

    events: list[list] = field(default_factory=list)
    states: list[tuple] = field(default_factory=list)


class _Log(TorchDispatchMode):
    def __init__(self, there: list[torch.Tensor]):
        super().__init__()
        self.events: list[list] = []
        self._alive = {tensor.untyped_storage()._cdata: None for tensor in there}
        # Collectives by the address of their result: the number, and what it reads, which Gloo has until it is over.
        self._issued_for: dict[int, tuple[int, list]] = {}
        self._born = self._issued = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) or kind.__name__ == "AsyncCollectiveTensor" for kind in types):
            return NotImplemented
        if func.namespace == "_c10d_functional" and func._overloadpacket.__name__ == "wait_tensor":
            return self._wait(func, args)
        used = [(a, _references(a)) for a in args if _is_plain(a)]
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(out) if _is_plain(leaf)]
        fresh = [t for t in tensors if t.untyped_storage()._cdata not in self._alive and t.untyped_storage().nbytes()]
        for tensor in fresh:
            self._follow(tensor.untyped_storage())
        if tensors and (fresh or func._schema.is_mutable):
            self._operator(func, args, tensors, used)
        return out

    def _wait(self, func, args):
        number, used = self._issued_for.pop(args[0].untyped_storage()._cdata, (None, ()))
        out = func(*args)
        if number is not None:
            self.events.append(["wait", number])
            _let_go(args[0], _OF_A_RESULT)
            while used:
                _let_go(*used.pop())
        return out

    def _follow(self, storage) -> None:
        address, number = storage._cdata, self._born
        self._born += 1

        def gone(_) -> None:
            del self._alive[address]
            self.events.append(["-", number])

        self._alive[address] = weakref.ref(storage, gone)
        self.events.append(["+", number, storage.nbytes()])

    def _operator(self, func, args, results: list[torch.Tensor], used: list) -> None:
        name = f"{func.namespace}.{func._overloadpacket.__name__}"
        kind = _KINDS.get(func._overloadpacket.__name__) if func.namespace == "_c10d_functional" else None
        if kind is None:
            if name not in _NO_KERNELS:
                self.events.append(["op", name, _dtype(args[0])])
            return
        group = dist.distributed_c10d._resolve_process_group(args[-1])
        whole = results[0] if kind == "all_gather" else args[0]
        ranks = dist.get_process_group_ranks(group)
        self.events.append(["collective", kind, _dtype(args[0]), whole.numel() * whole.element_size(), ranks])
        result = results[0].untyped_storage()
        self._issued_for[result._cdata] = (self._issued, used)
        self._issued += 1


def _is_plain(value) -> bool:
    return type(value) is torch.Tensor and value.device.type == "cpu"


def _references(tensor: torch.Tensor) -> tuple[int, int]:
    """To the tensor, and to its storage (Gloo works on views of a gather's output)."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _let_go(tensor: torch.Tensor, references: tuple[int, int]) -> None:
    """Threads of Gloo have a collective's tensors until a moment after it is over: until no more references are left.
    """
    until = time.monotonic() + _TIMEOUT_SECONDS
    while any(found > wanted for found, wanted in zip(_references(tensor), references)):
        assert time.monotonic() < until, f"{_references(tensor)} references, expected {references}"
        time.sleep(0.0001)


def _dtype(value) -> str:
    """The dtype of a tensor, or of the first one of a list."""
    first = next(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return str(first.dtype).removeprefix("torch.")


def record(case: MuonCase) -> Recorded:
    """This rank's second step. The first one makes the states, and DTensor's choices, which run on fake tensors."""
    names = ("replicate", "shard") if case.replicas > 1 else ("shard",)
    sizes = (case.replicas, case.shards) if case.replicas > 1 else (case.shards,)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    torch.manual_seed(0)
    model = case.model()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.Muon(model.parameters(), nesterov=case.nesterov, ns_steps=case.ns_steps)
    recorded = Recorded()
    for step in range(2):
        for layer in model:
            layer(torch.randn(3, layer.weight.shape[1], dtype=layer.weight.dtype)).float().square().sum().backward()
        parameters = list(model.parameters())
        held = [*parameters, *(p.grad for p in parameters)]
        held += [value for state in optimizer.state.values() for value in state.values()]
        log = _Log([tensor.to_local() for tensor in held])
        if step == 0:
            optimizer.step()
        else:
            with log:
                optimizer.step()
        recorded.events = log.events
        optimizer.zero_grad()
    for parameter in model.parameters():
        for name, value in optimizer.state[parameter].items():
            recorded.states.append((name, tuple(value.to_local().shape), _dtype(value)))
    return recorded


def work(rank: int, store: str, connection) -> None:
    """A rank's process: records each case that it is sent, in a group of the case's ranks."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no look-up of the host's name
    jobs = 0
    while (case := connection.recv()) is not None:
        jobs += 1
        if rank >= case.ranks:
            continue
        try:
            dist.init_process_group(
                "gloo", store=dist.FileStore(f"{store}.{jobs}", case.ranks), rank=rank, world_size=case.ranks
            )
            found = record(case)
            dist.destroy_process_group()
            connection.send(found)
        except Exception:
            connection.send(traceback.format_exc())
    os._exit(0)  # torch's threads take seconds to end
