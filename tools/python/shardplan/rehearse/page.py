# SPDX-License-Identifier: Apache-2.0
"""A rehearsal as one HTML page without external parts: the curve of allocated memory, steps and phases, the peak by
category and module."""

from __future__ import annotations

import html

from shardplan.command import printable_name

from . import text
from .device import Device

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _MARGIN = 900, 300, 70, 30, 12
_BARS = 20
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1000px; color: #222; }
svg { display: block; margin: 0.5em 0 1.5em; } svg text { font-size: 11px; fill: #555; }
.curve { fill: #24a; fill-opacity: 0.2; stroke: #24a; } .axis { stroke: #999; fill: none; } .budget { stroke: #c30; \
stroke-dasharray: 4 3; }
table { border-collapse: collapse; font-size: 13px; margin-bottom: 1.5em; } td, th { padding: 2px 10px; text-align: \
right; border-bottom: 1px solid #ddd; }
th { background: #f4f4f4; } td.name { text-align: left; } td.bar { text-align: left; width: 320px; } td.bar div { \
background: #24a; height: 10px; }
.wrong { color: #c30; }
@media (prefers-color-scheme: dark) {
  body { background: #14171c; color: #e6e9ef; } svg text { fill: #98a2b3; } .curve { fill: #7aa5f0; stroke: #7aa5f0; \
} .axis { stroke: #5d6675; }
  .budget { stroke: #ef7b72; } td, th { border-color: #2d333d; } th { background: #252a33; } td.bar div { background: \
#7aa5f0; } .wrong { color: #ef7b72; }
}
"""


def _words(name: str) -> str:
    return html.escape(printable_name(name), quote=True)


def page(result: dict, device: Device, command: list[str]) -> str:
    peak = result.get("peak")
    budget = text.budget_of(result, device)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>shardplan "
        f"rehearse</title><style>{_STYLE}</style></head><body>",
        f"<h1>Rank {result['rank']} of {result['world_size']} on {_words(device.name)}</h1>",
        f"<p><code>{_words(' '.join(command))}</code>, torch {_words(result['torch'])}, {result['steps']} steps</p>",
        _verdict(result, budget),
        *(["<h2>Allocated over the run</h2>", _curve(peak["curve"], budget)] if peak else []),
        "<h2>Steps</h2>",
        _steps(result),
        *(
            [
                f"<h2>The peak: {text.size_text(peak['size_bytes'])} in {_words(text.peak_place(result))}</h2>",
                _bars("category", peak["categories"]), _bars("module", text.grouped(peak["modules"])),
            ]
            if peak
            else []
        ),
        "<h2>The device</h2>",
        _device(result, device, budget),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _verdict(result: dict, budget: int) -> str:
    if text.fits(result):
        verdict = "It fits" if result["steps"] and result["error"] is None else "It fits so far"
        return (
            f"<p>{verdict}: {text.size_text(result['reserved_bytes'])} of {text.size_text(budget)} are reserved at "
            "the most.</p>"
        )
    error = result["error"]
    return (
        f"<p class='wrong'>Out of memory in {_words(error['place'])}: {_words(error['file'])}:{error['line']} "
        f"<code>{_words(error['code'])}</code></p>"
    )


def _curve(points: list[list[int]], budget: int) -> str:
    if not points:
        return "<p>nothing was allocated</p>"
    last, most = points[-1][0] or 1, max(size for _, size in points) or 1
    top = max(most, budget) if budget < 1.5 * most else most * 1.05

    def x_of(event: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _MARGIN) * event / last

    def y_of(size: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _MARGIN) * size / top

    path = "".join(f"L{x_of(event):.1f} {y_of(size):.1f}" for event, size in points)
    lines = [
        f"<svg width='{_WIDTH}' height='{_HEIGHT}' role='img'>",
        f"<path class='axis' d='M{_LEFT} {_MARGIN}V{_HEIGHT - _BOTTOM}H{_WIDTH - _MARGIN}'/>",
    ]
    for quarter in range(5):
        lines.append(
            f"<text x='{_LEFT - 6}' y='{y_of(top * quarter / 4) + 4:.1f}' "
            f"text-anchor='end'>{text.size_text(int(top * quarter / 4))}</text>"
        )
    lines.append(f"<path class='curve' d='M{_LEFT} {_HEIGHT - _BOTTOM}{path}V{_HEIGHT - _BOTTOM}Z'/>")
    if budget <= top:
        lines.append(
            f"<path class='budget' d='M{_LEFT} {y_of(budget):.1f}H{_WIDTH - _MARGIN}'><title>left for the allocator: "
            f"{text.size_text(budget)}</title></path>"
        )
    lines.append(
        f"<text x='{(_LEFT + _WIDTH) / 2:.0f}' y='{_HEIGHT - 8}' text-anchor='middle'>allocations and frees, in their "
        "order</text>"
    )
    return "\n".join([*lines, "</svg>"])


def _steps(result: dict) -> str:
    head, *rows = text.table_of(result)
    lines = ["<table>", "<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return "\n".join([*lines, "</table>"])


def _bars(what: str, sizes: dict[str, int]) -> str:
    most = max(sizes.values(), default=1) or 1
    lines = ["<table>", f"<tr><th>{what}</th><th>bytes</th><th></th></tr>"]
    shown = list(sizes.items())
    if rest := shown[_BARS:]:
        shown = [*shown[:_BARS], (f"{len(rest)} others", sum(size for _, size in rest))]
    for name, size in shown:
        lines.append(
            f"<tr><td class='name'>{_words(name) or '(in no module)'}</td><td>{text.size_text(size)}</td><td "
            f"class='bar'><div style='width:{max(0, min(320, 320 * size // most))}px'></div></td></tr>"
        )
    return "\n".join([*lines, "</table>"])


def _device(result: dict, device: Device, budget: int) -> str:
    rows = [
        ("device memory", device.memory_bytes),
        *text.outside_of(result, device),
        ("left for the allocator", budget),
        ("max reserved", result["reserved_bytes"]),
    ]
    return "\n".join(
        [
            "<table>",
            *(f"<tr><td class='name'>{_words(name)}</td><td>{text.size_text(size)}</td></tr>" for name, size in rows),
            "</table>",
        ]
    )
