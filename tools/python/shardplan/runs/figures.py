# SPDX-License-Identifier: Apache-2.0
"""Figures of a cluster document that runs can be fitted to: each is one factor on what belongs together."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass

MILLION = 1_000_000
# GPUs of one cluster differ by 8 % in the median application (Sinha et al., SC22: "Not all GPUs are created equal"),
# least to most.
_USUAL_SPREAD = 25_000
_ISSUED = ("operator_issue_ns", "collective_issue_ns", "copy_issue_ns", "allocate_ns", "event_ns", "trigger_ns")


@dataclass(frozen=True)
class Figure:
    """`scale` makes what it names so many times as fast. `source`: its name among the document's sources, "" where it
    has none."""

    name: str
    words: str
    source: str
    scale: Callable[[dict, float], None]
    worse: str = "slower"
    better: str = "faster"


def _times(holder: dict, field: str, factor: float, least: int = 1) -> None:
    if holder.get(field):
        holder[field] = max(least, round(holder[field] * factor))


def _clock(document: dict, factor: float) -> None:
    device = document["device"]
    device["clock_ppm"] = min(MILLION, max(1, round(device.get("clock_ppm", MILLION) * factor)))


def _matmul(document: dict, factor: float) -> None:
    for rate in document["device"].get("matmul", []):
        _times(rate, "flops_per_second", factor)
        for row in rate.get("shapes", []):
            for point in row["points"]:
                _times(point, "duration_ns", 1 / factor)


def _attention(document: dict, factor: float) -> None:
    device = document["device"]
    device.setdefault(
        "attention",
        copy.deepcopy([{k: v for k, v in rate.items() if k != "shapes"} for rate in device.get("matmul", [])]),
    )
    for rate in (*device["attention"], *device.get("attention_backward", [])):
        _times(rate, "flops_per_second", factor)


def _memory(document: dict, factor: float) -> None:
    _times(document["device"], "memory_bytes_per_second", factor)


def _host(document: dict, factor: float) -> None:
    for field in _ISSUED:
        _times(document.get("host", {}), field, 1 / factor)


def _optimizer(document: dict, factor: float) -> None:
    """Scales the issue of the optimizer's operators. A document without that figure starts from that of all
    operators."""
    host = document.get("host", {})
    if factor != 1 and "operator_issue_ns" in host:
        host["optimizer_issue_ns"] = host.get("optimizer_issue_ns") or host["operator_issue_ns"]
    _times(host, "optimizer_issue_ns", 1 / factor)


def _spread(document: dict, factor: float) -> None:
    device = document["device"]
    device["spread_ppm"] = min(
        MILLION // 10, max(0, round(device.get("spread_ppm", 0) + _USUAL_SPREAD * (1 / factor - 1)))
    )
    if not device["spread_ppm"]:
        del device["spread_ppm"]


def _links(document: dict, links: list[dict], factor: float) -> None:
    for link in links:
        _times(link, "bytes_per_second", factor)
    names = {link.get("name") for link in links}
    for table in document.get("collectives", []):
        if table.get("link") in names:
            for point in table["points"]:
                _times(point, "duration_ns", 1 / factor)


def _inner_link(document: dict, factor: float) -> None:
    _links(document, document.get("links", [])[:1], factor)


def _latency(document: dict, factor: float) -> None:
    """Scales the latency, which a collective takes at any size. In a table it is the duration of the smallest size."""
    inner = document.get("links", [])[:1]
    for link in inner:
        for field in ("latency_ns", "base_latency_ns"):
            _times(link, field, 1 / factor)
    for table in document.get("collectives", []):
        if table.get("link") in {link.get("name") for link in inner} and table["points"]:
            more = table["points"][0]["duration_ns"] * (1 / factor - 1)
            for point in table["points"]:
                point["duration_ns"] = max(1, round(point["duration_ns"] + more))


def _network(document: dict, factor: float) -> None:
    _links(document, document.get("links", [])[1:], factor)


FIGURES = {
    figure.name: figure
    for figure in (
        Figure("clock", "the clock under load: all arithmetic, fused attention too", "matmul", _clock),
        Figure("matmul", "products of matrices", "matmul", _matmul),
        Figure("attention", "fused attention, forward and backward", "attention", _attention),
        Figure("memory", "kernels that are bound by device memory", "memory", _memory),
        Figure("host", "what the host takes to issue work", "host", _host),
        Figure("optimizer", "what the host takes for an operator of the optimizer", "host", _optimizer),
        Figure(
            "spread", "how far devices of a kind differ, the slowest of which a step waits for", "", _spread, "wider",
            "narrower",
        ),
        Figure(
            "inner_link", "the link inside a node: its rate, and the tables measured over it", "inner_link", _inner_link
        ),
        Figure("latency", "what a collective inside a node takes however small it is", "inner_link", _latency),
        Figure("network", "the link between nodes", "network", _network),
    )
}


def named(text: str, most: int) -> list[str]:
    """The figures of an argument NAME,..."""
    names = text.split(",")
    for name in names:
        if name not in FIGURES:
            raise argparse.ArgumentTypeError(f"no such figure (found {name}, expected some of {','.join(FIGURES)})")
    if len(set(names)) != len(names) or len(names) > most:
        raise argparse.ArgumentTypeError(f"found {text}, expected {most} figures or fewer, each once")
    return names


def scaled(document: dict, factors: dict[str, float]) -> dict:
    """The document with these figures so many times as fast. In FIGURES' order: an optimizer without a time of its own
    begins with the host's."""
    made = copy.deepcopy(document)
    for name, figure in FIGURES.items():
        if name in factors:
            figure.scale(made, factors[name])
    return made

