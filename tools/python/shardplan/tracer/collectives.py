# SPDX-License-Identifier: Apache-2.0
"""Collectives as operators: the arguments that each reads and writes.

torch.distributed's own operators (c10d.*) write into arguments, and their schemas do not say so. A send gives nothing
back, and a receive gives its argument back. By its schema such an operator is a view. The tables say what it is.
Functional collectives make their results, as other operators do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


class UnknownCollective(Exception):
    """A collective whose arguments are in no table here: a trace with it could only leave it out."""


@dataclass(frozen=True)
class Arguments:
    """Positions among a collective's arguments, each a tensor or a nest of lists of them."""

    read: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    makes_results: bool = False  # which are written


_IN_PLACE = Arguments((0,), (0,))
_INTO_FIRST = Arguments((1,), (0,))
_BARRIER = Arguments()  # it moves nothing

# The root of broadcast_ writes nothing and the other ranks read nothing (`accessed`).
_C10D = {
    "_allgather_base_": _INTO_FIRST,
    "_reduce_scatter_base_": _INTO_FIRST,
    "allgather_": _INTO_FIRST,
    "allgather_coalesced_": _INTO_FIRST,
    "allgather_into_tensor_coalesced_": _INTO_FIRST,
    "allreduce_": _IN_PLACE,
    "allreduce_coalesced_": _IN_PLACE,
    "alltoall_": _INTO_FIRST,
    "alltoall_base_": _INTO_FIRST,
    "barrier": _BARRIER,
    "broadcast_": _IN_PLACE,
    "check_for_nan": Arguments((0,)),
    "gather_": _INTO_FIRST,
    "gather_into_tensor_": _INTO_FIRST,
    "monitored_barrier_": _BARRIER,
    "recv_": Arguments((), (0,)),
    "recv_any_source_": Arguments((), (0,)),
    "reduce_": _IN_PLACE,
    "reduce_scatter_": _INTO_FIRST,
    "reduce_scatter_tensor_coalesced_": _INTO_FIRST,
    "scatter_": _INTO_FIRST,
    "send": Arguments((0,)),
}
_TRANSFERS = {
    "isend": Arguments((0,)),
    "irecv": Arguments(makes_results=True),  # its argument says the shape
    "batch_p2p_ops": _IN_PLACE,  # see `accessed`
}
# Their results are new tensors, or the schema says what they write.
_MAKE_RESULTS = frozenset(
    "all_gather_into_tensor all_gather_into_tensor_coalesced all_gather_into_tensor_out all_reduce all_reduce_ "
    "all_reduce_coalesced all_reduce_coalesced_ all_to_all_single broadcast broadcast_ reduce_scatter_tensor "
    "reduce_scatter_tensor_coalesced reduce_scatter_tensor_out wait_tensor wait_tensors shard_dim_alltoall".split()
)
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")


def arguments(func) -> Arguments | None:
    """None: no collective, or one that is described as other operators are. Raises UnknownCollective."""
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
    if name == "_c10d_functional.batch_p2p_ops":
        kinds, tensors = args[0], args[3]
        sent, received = ([t for kind, t in zip(kinds, tensors) if kind == word] for word in ("isend", "irecv"))
        return sent, received
    return [args[i] for i in known.read], [args[i] for i in known.written]


def done_at_once(func, args: tuple):
    """The result of a collective that torch has for no fake tensor (the one of torch.distributed._coalescing_manager);
    None: it has."""
    if func.namespace != "c10d" or not func._overloadpacket.__name__.endswith("_coalesced_"):
        return None
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()
