# SPDX-License-Identifier: Apache-2.0
"""Work of CPU ranks: operators of the host's thread, and collectives in threads of Gloo's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from . import collectives
from .work import GLOO, HOST, Collective, Work

_GLOO = re.compile(r"gloo:\w+$")
_ENGINE = "autograd::engine"
# They call a collective or wait for one, and compute nothing.
_CALLS = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::")
_WAITS = re.compile(r"_c10d_functional\w*::wait_tensors?$")


def _is_operator(name: str) -> bool:
    return "::" in name and not name.startswith(_ENGINE)


def _runs(call: dict, span: dict) -> bool:
    """Gloo's reduce_scatter is an all_reduce of its threads: the recorded call says what was meant."""
    kinds = collectives.call_kind(call), collectives.call_kind(span)
    return kinds[0] == kinds[1] or kinds == ("reduce_scatter", "all_reduce")


def _join_transfers(work: list[Work]) -> list[Work]:
    """Sends and receives that are under way at once are one, as NCCL has them (collectives.py)."""
    kept: list[Work] = []
    parts: dict[int, list[Collective]] = {}
    last: Work | None = None
    for one in work:
        if one.collective.kind not in collectives.TRANSFERS:
            kept.append(one)
        elif last is not None and one.begin_ns < last.end_ns:
            last.end_ns = max(last.end_ns, one.end_ns)
            parts[id(last)].append(one.collective)
            last.collective = collectives.joined(parts[id(last)])
        else:
            last = one
            parts[id(one)] = [one.collective]
            kept.append(one)
    return kept


def _on_threads(calls: list[tuple[dict, tuple[str, ...]]], spans: Iterable[dict]) -> list[Work]:
    """A thread's span is of the first call that it may be of. calls: in order."""
    work = []
    for span in spans:
        for number, (call, ranges) in enumerate(calls):
            if call["begin"] > span["begin"]:
                break
            if _runs(call, span):
                del calls[number]
                one = collectives.called(call, span)
                work.append(Work(span["begin"], span["end"], GLOO, span["name"], call["begin"], (), ranges, one))
                break
    return _join_transfers(work)


def work_of(
    spans: list[dict], around: Callable[[dict], tuple[tuple[str, ...], tuple[str, ...]]]
) -> tuple[list[Work], list[tuple[int, int]]]:
    """Outermost operators are the work, below the nodes of autograd, which have no namespace; and when the host waits.
    around: operators and ranges around the begin of a span."""
    in_order = sorted(spans, key=lambda span: span["begin"])
    calls, work, waits = [], [], []
    for span in in_order:
        if span.get("cat") != "cpu_op" or not _is_operator(span["name"]):
            continue
        operators, ranges = around(span)
        if collectives.is_call(span["name"]):
            calls.append((span, ranges))
        elif sum(_is_operator(name) for name in operators) > 1:
            continue
        elif _WAITS.match(span["name"]):
            waits.append((span["begin"], span["end"]))
        elif not span["name"].startswith(_CALLS):
            work.append(Work(span["begin"], span["end"], HOST, span["name"], span["begin"], operators, ranges))
    of_gloo = [span for span in in_order if span.get("cat") == "user_annotation" and _GLOO.match(span["name"])]
    return work + _on_threads(calls, of_gloo), waits
