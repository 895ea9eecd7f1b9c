# SPDX-License-Identifier: Apache-2.0
"""Collectives as a profile has them: what c10d, NCCL and Gloo call them, among which ranks, and how many bytes.

[Note: sends in one kernel] NCCL moves an all_to_all, a gather, a scatter and all sends and receives of a group by one
kernel, SendRecv. The call that launched it says which of them it is. The calls of a group of sends launch nothing: the
kernel comes when the group ends, and stands for all of them. Both directions run at once, so the larger one counts.
"""

from __future__ import annotations

import collections
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence

from .work import Collective

TRANSFERS = ("send", "recv")
_C10D = "c10d::"

# Names without underscores at the ends -> the plan's kinds.
_KINDS = {
    "all_gather": (
        "allgather", "allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather",
        "all_gather_base", "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_gather_single",
    ),
    "reduce_scatter": (
        "reduce_scatter", "reduce_scatter_base", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced",
        "reduce_scatter_single",
    ),
    "all_reduce": ("allreduce", "allreduce_coalesced", "allreduce_sparse", "all_reduce"),
    "all_to_all": (
        "alltoall", "alltoall_base", "all_to_all", "all_to_allv", "all_to_all_single", "all_to_all_v_single",
    ),
    "broadcast": ("broadcast", "broadcast_oop"),
    "reduce": ("reduce", "reduce_oop"),
    "gather": ("gather", "gather_into_tensor", "gather_single"),
    "scatter": ("scatter",),
    "send": ("send", "isend"),
    "recv": ("recv", "irecv", "recv_any_source", "recvAnysource"),
}  # fmt: skip
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
_KERNEL = re.compile(r"nccl\w*?_([A-Z]\w*?)(_|\()")
_KIND_OF_KERNEL = {
    "AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "AllReduce": "all_reduce", "Broadcast": "broadcast",
    "Reduce": "reduce",
}  # fmt: skip
_SEND_RECV = "SendRecv"
_ELEMENT_BYTES = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip
_SCALAR_TYPES = {"float": "Float", "double": "Double", "long int": "Long", "int": "Int", "short int": "Short"}
_SCALAR_TYPES |= {"unsigned char": "Byte", "signed char": "Char", "bool": "Bool"}


def kind_of(name: str) -> str:
    """The plan's kind; the name itself where a plan has none."""
    return _KIND_OF.get(name.strip("_"), name)


def _count(arguments: dict, key: str) -> int:
    value = arguments.get(key, 0)
    return value if isinstance(value, int) else 0


def _size_bytes(kind: str, arguments: dict, ranks: int) -> int:
    """The bytes that the plan counts: schemas/include/shardplan/schemas/collective_kinds.h."""
    sent, received = _count(arguments, "In msg nelems"), _count(arguments, "Out msg nelems")
    elements = {
        "all_gather": received,
        "reduce_scatter": sent,
        "all_to_all": sent,
        "gather": max(received, sent * ranks),
        "scatter": max(sent, received * ranks),
    }.get(kind, max(sent, received))
    return elements * _ELEMENT_BYTES.get(str(arguments.get("dtype")), 0)


def _is_said(arguments: dict) -> bool:
    return isinstance(arguments.get("Collective name"), str)


def said(arguments: dict) -> Collective:
    """By the metadata that c10d gives the profiler."""
    kind = kind_of(arguments["Collective name"])
    try:
        group = tuple(json.loads(arguments.get("Process Group Ranks") or "[]"))
    except (TypeError, ValueError):
        group = ()  # "[0, 1, ...]" of a large group
    size = _count(arguments, "Group size")
    name = arguments.get("Process Group Description")
    return Collective(
        kind, group, _size_bytes(kind, arguments, len(group) or size), size, name if isinstance(name, str) else ""
    )


def _by_call(stack: Sequence[dict]) -> Collective | None:
    """By an operator around the launch, else by a range; None: none says what it is."""
    for span in reversed(stack):
        if is_call(span["name"]):
            return called(span)
    for span in reversed(stack):
        word = span["name"].removeprefix("nccl:").split(" ")[0].strip("_")  # "nccl:send 0->1"
        if span["name"].startswith("nccl:") and word in _KIND_OF:
            return Collective(_KIND_OF[word], (), 0)
    return None


class Transfers:
    """Sends and receives that the host called and no kernel stands for yet, by thread."""

    def __init__(self, spans: Iterable[dict]) -> None:
        self._by_thread = collections.defaultdict(collections.deque)
        for span in sorted(spans, key=lambda span: span["begin"]):
            if span.get("cat") == "cpu_op" and _is_said(span["args"]) and said(span["args"]).kind in TRANSFERS:
                self._by_thread[span["pid"], span["tid"]].append((span["begin"], said(span["args"])))

    def until(self, thread: tuple, moment: int) -> list[Collective]:
        waiting, taken = self._by_thread.get(thread, ()), []
        while waiting and waiting[0][0] <= moment:
            taken.append(waiting.popleft()[1])
        return taken


def joined(transfers: Sequence[Collective]) -> Collective:
    """[Note: sends in one kernel]"""
    way = collections.Counter()
    for one in transfers:
        way[one.kind] += one.full_tensor_bytes
    first = transfers[0]
    return Collective(first.kind, first.group, max(way.values()), first.size, first.group_name)


def of_kernel(
    kernel: str, arguments: dict, stack: Sequence[dict], transfers: Callable[[], list[Collective]]
) -> Collective | None:
    """None: no kernel of NCCL's. stack: the host's spans around its launch. transfers: those that wait for a kernel. A
    plan calls NCCL itself, and its kernels have a name alone."""
    if not kernel.startswith("nccl"):
        return None
    match = _KERNEL.match(kernel)
    word = match.group(1) if match else kernel
    around = next((span["args"] for span in reversed(stack) if _is_said(span["args"])), {})
    one = said(arguments) if _is_said(arguments) else said(around) if around else None
    of_group = word == _SEND_RECV and (one is None or one.kind in TRANSFERS or one.kind not in _KINDS)
    if of_group and (waiting := transfers()):
        return joined(waiting)
    if one is not None:
        return one
    return _by_call(stack) or Collective(_KIND_OF_KERNEL.get(word, word), (), 0)


# ---- calls on CPUs, by the shapes of their inputs where they were recorded ----


def is_call(name: str) -> bool:
    return name.startswith(_C10D)


def call_kind(span: dict) -> str:
    """The kind of a call of c10d's, or of a span of Gloo's threads."""
    return kind_of(span["name"].removeprefix(_C10D).removeprefix("gloo:"))


def _elements(shapes: object) -> int:
    """Elements of a tensor, or of a list of them. 0: not known."""
    if not isinstance(shapes, list):
        return 0
    if all(isinstance(length, int) for length in shapes):
        return math.prod(shapes)
    return sum(map(_elements, shapes))


def _element_bytes(arguments: dict) -> int:
    """The first dtype that is said; 0: lists of tensors say none."""
    words = (str(dtype).removeprefix("c10::") for dtype in arguments.get("Input type") or [])
    return next((size for word in words if (size := _ELEMENT_BYTES.get(_SCALAR_TYPES.get(word, word), 0))), 0)


def called(call: dict, thread: dict | None = None) -> Collective:
    """A call `is_call`, and what Gloo's thread ran for it. It does not say its group. That of a gathered or scattered
    tensor has as many ranks as the tensor has parts."""
    kind = call_kind(call)
    element = _element_bytes(call["args"]) or (_element_bytes(thread["args"]) if thread else 0)
    # No tensor has the shape of a scalar, and lists of lists have, too: their types tell them apart.
    types, shapes = call["args"].get("Input type") or [], call["args"].get("Input Dims") or []
    counts = [_elements(shape) if str(dtype) else 0 for shape, dtype in zip(shapes, types)]
    output, input_ = [*counts, 0, 0][:2]
    if kind == "all_gather":
        return Collective(kind, (), output * element, output // input_ if input_ else 0)
    if kind == "reduce_scatter":
        return Collective(kind, (), input_ * element, input_ // output if output else 0)
    if kind in ("gather", "scatter"):
        return Collective(kind, (), 0)
    return Collective(kind, (), (input_ if kind == "all_to_all" else output) * element)
