# SPDX-License-Identifier: Apache-2.0
"""Collectives as operators: the arguments that each reads and writes, and what it moves among which ranks.

torch.distributed's own operators (c10d.*) write into arguments, and their schemas do not say so. A send gives nothing
back, and a receive gives its argument back. By its schema such an operator is a view. The tables say what it is.
Functional collectives make their results, as other operators do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MILLION = 1_000_000


class CollectiveProblem(Exception):
    """A collective that a trace cannot have. The place is added where it is caught."""


class UnknownCollective(CollectiveProblem):
    """A collective whose arguments are in no table here: a trace with it could only leave it out."""


@dataclass(frozen=True)
class Arguments:
    """Positions among a collective's arguments, each a tensor or a nest of lists of them. kind: "": it moves
    nothing."""

    kind: str = ""
    read: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    makes_results: bool = False  # which are written


def _in_place(kind: str) -> Arguments:
    return Arguments(kind, (0,), (0,))


def _into_first(kind: str) -> Arguments:
    return Arguments(kind, (1,), (0,))


_NOTHING = Arguments()

# The root of broadcast_ writes nothing and the other ranks read nothing (`accessed`).
_C10D = {
    "_allgather_base_": _into_first("all_gather"),
    "_reduce_scatter_base_": _into_first("reduce_scatter"),
    "allgather_": _into_first("all_gather"),
    "allgather_coalesced_": _into_first("all_gather"),
    "allgather_into_tensor_coalesced_": _into_first("all_gather"),
    "allreduce_": _in_place("all_reduce"),
    "allreduce_coalesced_": _in_place("all_reduce"),
    "alltoall_": _into_first("all_to_all"),
    "alltoall_base_": _into_first("all_to_all"),
    "barrier": _NOTHING,
    "broadcast_": _in_place("broadcast"),
    "check_for_nan": _NOTHING,
    "gather_": _into_first("gather"),
    "gather_into_tensor_": _into_first("gather"),
    "monitored_barrier_": _NOTHING,
    "recv_": Arguments("recv", (), (0,)),
    "recv_any_source_": Arguments("recv", (), (0,)),
    "reduce_": _in_place("reduce"),
    "reduce_scatter_": _into_first("reduce_scatter"),
    "reduce_scatter_tensor_coalesced_": _into_first("reduce_scatter"),
    "scatter_": _into_first("scatter"),
    "send": Arguments("send", (0,)),
}
BATCH = "batch_p2p_ops"  # one operator, several transfers
_TRANSFERS = {
    "isend": Arguments("send", (0,)),
    "irecv": Arguments("recv", makes_results=True),  # its argument says the shape
    BATCH: _in_place("send"),  # see `accessed`
}
# Their results are new tensors, or the schema says what they write.
_MAKE_RESULTS = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "shard_dim_alltoall": "all_to_all",
    "wait_tensor": "",
    "wait_tensors": "",
}
_WAITS_ITSELF = "_dtensor"  # namespace of collectives that are over when they return
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")


def is_collective(func) -> bool:
    return func.namespace in _NAMESPACES


def arguments(func) -> Arguments | None:
    """None: no collective, or one whose tensors are described as other operators' are. Raises UnknownCollective."""
    namespace, name = func.namespace, func._overloadpacket.__name__
    if namespace not in _NAMESPACES:
        return None
    if namespace == "c10d" and name in _C10D:
        return _C10D[name]
    if namespace.startswith("_c10d_functional") and name in _TRANSFERS:
        return _TRANSFERS[name]
    if namespace in ("_c10d_functional", "_c10d_functional_autograd", "_dtensor") and name in _MAKE_RESULTS:
        return None
    raise UnknownCollective(f"the tracer does not know what the collective {namespace}.{name} reads and writes")


def kind_of(func) -> str:
    """Its name in a trace; "": no collective, or one that moves nothing. `arguments` knows it."""
    if not is_collective(func):
        return ""
    name = func._overloadpacket.__name__
    return _MAKE_RESULTS.get(name, "") if (known := arguments(func)) is None else known.kind


def accessed(name: str, known: Arguments, args: tuple) -> tuple[list, list]:
    """The arguments that this rank reads and those that it writes."""
    if name == "c10d.broadcast_":
        tensors, group, root = args[:3]
        is_root = torch.distributed.ProcessGroup.unbox(group).rank() == root
        return ([tensors], []) if is_root else ([], [tensors])
    if name == "c10d.reduce_":
        tensors, group, _, root = args[:4]
        is_root = torch.distributed.ProcessGroup.unbox(group).rank() == root
        return [tensors], [tensors] if is_root else []
    if name == f"_c10d_functional.{BATCH}":
        kinds, tensors = args[0], args[3]
        sent, received = ([t for kind, t in zip(kinds, tensors) if kind == word] for word in ("isend", "irecv"))
        return sent, received
    return [args[i] for i in known.read], [args[i] for i in known.written]


# ---- among whom, and how much ----


def argument(func, args: tuple, kwargs: dict, name: str):
    """By the name that it has in the schema; None: it is not given, or there is none."""
    for position, declared in enumerate(func._schema.arguments):
        if declared.name == name:
            return args[position] if position < len(args) else kwargs.get(name)
    return None


def group_of(func, args: tuple, kwargs: dict):
    group = argument(func, args, kwargs, "process_group")
    if group is None:
        group = argument(func, args, kwargs, "group_name")
    if isinstance(group, str):
        return torch.distributed.distributed_c10d._resolve_process_group(group)
    return torch.distributed.ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group


def is_over_at_once(func, args: tuple, kwargs: dict) -> bool:
    """Whether the stream that issues it waits for it by itself."""
    return func.namespace == _WAITS_ITSELF or argument(func, args, kwargs, "async_op") is False


def _bytes(value) -> int:
    """value: a tensor or a nest of lists of them."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value))


def size_bytes(func, kind: str, args: tuple, kwargs: dict, out, members: int) -> int:
    """The full tensor is what an all_gather makes, a reduce_scatter takes, a root has."""
    known = arguments(func)
    if kind == "all_gather":
        return _bytes(out if known is None else args[0])
    if kind == "gather":
        return members * _bytes(args[1])
    if kind == "scatter":
        return members * _bytes(args[0])
    if kind in ("reduce_scatter", "all_to_all"):
        return _bytes(args[0] if known is None else args[1])
    return _bytes(args[0])


def peer_of(func, args: tuple, kwargs: dict) -> int | None:
    """Whom a transfer is to or from, as position in the group."""
    for name in ("dst", "src"):
        if (peer := argument(func, args, kwargs, name)) is not None:
            return peer
    return None


def splits_of(func, args: tuple, kwargs: dict) -> tuple[list[int], list[int], int, int] | None:
    """The rows that an all_to_all sends to each rank and receives from each, and those that both tensors have; None: as
    many to and from each."""
    name = func._overloadpacket.__name__
    if name == "alltoall_base_":
        sent, received = args[4], args[3]
        rows = args[1].shape[0], args[0].shape[0]
    elif name == "all_to_all_single":
        sent, received = args[2], args[1]
        rows = args[0].shape[0], sum(received)
    elif name == "alltoall_":
        sent, received = ([tensor.numel() for tensor in tensors] for tensors in (args[1], args[0]))
        rows = sum(sent), sum(received)
    else:
        return None
    return (list(sent), list(received), *rows) if sent or received else None


def check_splits(splits: tuple[list[int], list[int], int, int], members: int, rank: int) -> int:
    """Raises CollectiveProblem where no ranks can agree on the splits. Returns what the busiest rank sends or receives,
    in millionths of what this rank sends.

    A trace is of one rank. The other ranks do as it does: each exchanges as much as this one, or each sends with the
    same splits, or answers such an exchange.
    """
    sent, received, rows_in, rows_out = splits
    for what, parts, rows in (("input", sent, rows_in), ("output", received, rows_out)):
        if parts and len(parts) != members:
            raise CollectiveProblem(
                f"an all_to_all among {members} ranks has {len(parts)} {what} splits ({parts})"
            )
        if parts and sum(parts) != rows:
            raise CollectiveProblem(f"the {what} splits {parts} of an all_to_all do not make the {rows} rows")
    sent = sent or [rows_in // members] * members
    received = received or [rows_out // members] * members
    if sent[rank] != received[rank]:
        raise CollectiveProblem(
            f"the splits of an all_to_all disagree: this rank (number {rank} of {members}) sends itself {sent[rank]} "
            f"rows and receives {received[rank]} from itself"
        )
    total = sum(sent)
    if sum(received) == total or total == 0:
        return MILLION
    if received == [sent[rank]] * members:  # all ranks have the same splits
        return -(-max(max(sent) * members, total) * MILLION // total)
    if sent == [received[rank]] * members:  # the way back
        return -(-max(max(received) * members, sum(received)) * MILLION // total)
    raise CollectiveProblem(
        f"the splits of an all_to_all disagree: the rank sends {total} rows ({sent}) and receives {sum(received)} "
        f"({received}). If every rank does alike, as much is received as is sent"
    )


def hidden(func, args: tuple):
    """The Python code of an operator that communicates inside, which its rule for fake tensors leaves out: one of
    torch.library.custom_op that is given the name of a process group; None: another operator."""
    names = [value for value in args if isinstance(value, str)]
    if not names or not torch.distributed.is_initialized():
        return None
    if set(torch.distributed.distributed_c10d._world.pg_names.values()).isdisjoint(names):
        return None
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(func._schema.name)
    return None if definition is None else definition._init_fn


def composed(func, args: tuple):
    """The operators that a device runs for a functional collective, in place of it; None: the collective alone.

    Functional.cpp of torch/csrc/distributed/c10d copies a tensor and reduces or broadcasts the copy. An exchange of
    dimensions is one of blocks that lie one behind the other: it copies the tensor before or after.
    """
    name = func._overloadpacket.__name__
    if func.namespace == _WAITS_ITSELF and name == "shard_dim_alltoall" and args[1] != args[2]:
        return _exchange_dimensions
    return _COPY_FIRST.get(name) if func.namespace == "_c10d_functional" else None


def _in_a_copy(name: str):
    def run(tensor, *args, **kwargs):
        in_place = getattr(torch.ops._c10d_functional, name)
        return in_place(tensor.clone(memory_format=torch.contiguous_format), *args, **kwargs)

    return run


_COPY_FIRST = {"all_reduce": _in_a_copy("all_reduce_"), "broadcast": _in_a_copy("broadcast_")}


def _exchange_dimensions(tensor, gather_dim: int, shard_dim: int, group):
    exchange = torch.ops._dtensor.shard_dim_alltoall
    members = group_of(exchange.default, (tensor, gather_dim, shard_dim, group), {}).size()
    blocks = list(tensor.shape)
    blocks[shard_dim : shard_dim + 1] = [members, blocks[shard_dim] // members]
    sent = tensor.view(blocks).movedim(shard_dim, 0).contiguous()
    received = exchange(sent, 0, 0, group)  # of the blocks
    result = received.movedim(0, gather_dim).contiguous()
    del received  # before `sent`, as the device's code does
    shape = list(tensor.shape)
    shape[shard_dim] //= members
    shape[gather_dim] *= members
    return result.view(shape)


def of_its_own(func, out):
    """The result in memory of its own, as on a device. The fake kernel of DTensor's all-to-all gathers the whole, and
    may give a view of this rank's part (torch/distributed/tensor/_collective_utils.py)."""
    if func.namespace != _WAITS_ITSELF or not isinstance(out, torch.Tensor):
        return out
    return out.clone() if out.untyped_storage().nbytes() > out.nbytes else out


def done_at_once(func, args: tuple):
    """The result of a collective that torch has for no fake tensor (the one of torch.distributed._coalescing_manager);
    None: it has."""
    if func.namespace != "c10d" or not func._overloadpacket.__name__.endswith("_coalesced_"):
        return None
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()
