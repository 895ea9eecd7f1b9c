# SPDX-License-Identifier: Apache-2.0
"""A sweep as one HTML page: memory against time, what a token costs, and the rows."""

from __future__ import annotations

import html
import math

from shardplan.command import printable_name

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _MARGIN = 640, 360, 70, 46, 16
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; color: #222; }
svg { display: block; margin: 0.5em 0 1.5em; } text { font-size: 11px; fill: #555; }
.point { fill: #9ab; } .front { fill: #24a; } .out { fill: none; stroke: #b99; } .best { fill: none; stroke: #c30; \
stroke-width: 2.5; }
.line { fill: none; stroke: #24a; stroke-opacity: 0.5; } .axis { stroke: #999; } .budget { stroke: #c30; \
stroke-dasharray: 4 3; }
table { border-collapse: collapse; font-size: 12px; } td, th { padding: 2px 8px; text-align: right; border-bottom: \
1px solid #ddd; }
th { cursor: default; background: #f4f4f4; } tr.best td { background: #fde8e0; }
@media (prefers-color-scheme: dark) {
  body { background: #14171c; color: #e6e9ef; } text { fill: #98a2b3; } .point { fill: #66788f; } .front { fill: \
#7aa5f0; } .line { stroke: #7aa5f0; }
  .out { stroke: #a08080; } .best { stroke: #ef7b72; } .axis { stroke: #5d6675; } .budget { stroke: #ef7b72; }
  td, th { border-color: #2d333d; } th { background: #252a33; } tr.best td { background: #4a2a24; }
}
"""


def front(points: list[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other is at least as small as in both figures and smaller in one, from left to
    right; of equal ones the first."""
    order = sorted(range(len(points)), key=lambda i: (points[i], i))
    kept, least = [], math.inf
    for i in order:
        if points[i][1] < least:
            kept.append(i)
            least = points[i][1]
    return kept


def gpu_seconds(row: dict[str, str]) -> float:
    """GPU seconds of a million tokens: a cost that needs no price of an hour."""
    rate = float(row["tokens_per_second_per_rank"] or 0)
    return 1e6 / rate if rate > 0 else math.inf


def best_of(rows: list[dict[str, str]]) -> dict[str, str] | None:
    """The one with the most tokens per second that fits."""
    fitting = [row for row in rows if row["fits"] == "yes"]
    return max(fitting, key=lambda row: float(row["tokens_per_second"] or 0), default=None)


def page(rows: list[dict[str, str]], axes: list[str], price: float | None) -> str:
    """`price`: of an hour of a device; None: tokens cost device seconds."""
    done = [row for row in rows if not row["error"]]
    best = best_of(done)
    cost = [gpu_seconds(row) * (price / 3600 if price is not None else 1) for row in done]
    unit = "price of a million tokens" if price is not None else "device seconds of a million tokens"
    needed = [float(row["needed_gib"]) for row in done]
    shown = [axis for axis in axes if len({row[axis] for row in rows}) > 1] or axes
    names = [", ".join(f"{axis} {row[axis]}" for axis in shown) for row in done]
    parts = [
        "<!doctype html><html><head><meta charset='utf-8'><title>shardplan "
        f"sweep</title><style>{_STYLE}</style></head><body>",
        f"<h1>{len(rows)} configurations</h1>",
        f"<p>{sum(row['fits'] == 'yes' for row in done)} fit; {len(rows) - len(done)} were refused. Filled dark: no "
        "other needs less of both. Hollow: does not fit. Ringed: the most tokens per second that fits.</p>",
        "<h2>Memory against time</h2>",
        _plot(done, [float(row["step_ms"]) for row in done], needed, "step, ms", "memory needed, GiB", names, best),
        "<h2>Memory against cost</h2>",
        _plot(done, cost, needed, unit, "memory needed, GiB", names, best),
        _table(rows, axes, best),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _plot(
    rows: list[dict[str, str]],
    xs: list[float],
    ys: list[float],
    x_words: str,
    y_words: str,
    names: list[str],
    best: dict[str, str] | None,
) -> str:
    finite = [i for i, x in enumerate(xs) if math.isfinite(x)]
    if not finite:
        return "<p>nothing to show</p>"
    x_of = _scale([xs[i] for i in finite], _LEFT, _WIDTH - _MARGIN)
    y_of = _scale([ys[i] for i in finite], _HEIGHT - _BOTTOM, _MARGIN)
    best_points = {finite[k] for k in front([(xs[i], ys[i]) for i in finite])}
    lines = [
        f"<svg width='{_WIDTH}' height='{_HEIGHT}' role='img'>",
        f"<path class='axis' fill='none' d='M{_LEFT} {_MARGIN}V{_HEIGHT - _BOTTOM}H{_WIDTH - _MARGIN}'/>",
    ]
    for place in range(5):
        x, y = (low + (high - low) * place / 4 for low, high in ((x_of.low, x_of.high), (y_of.low, y_of.high)))
        lines.append(f"<text x='{x_of(x):.1f}' y='{_HEIGHT - _BOTTOM + 16}' text-anchor='middle'>{x:.4g}</text>")
        lines.append(f"<text x='{_LEFT - 6}' y='{y_of(y) + 4:.1f}' text-anchor='end'>{y:.4g}</text>")
    lines.append(
        f"<text x='{(_LEFT + _WIDTH) / 2:.0f}' y='{_HEIGHT - 8}' text-anchor='middle'>{html.escape(x_words)}</text>"
    )
    lines.append(
        f"<text transform='translate(14 {_HEIGHT / 2:.0f}) rotate(-90)' "
        f"text-anchor='middle'>{html.escape(y_words)}</text>"
    )
    along = sorted(best_points, key=lambda i: xs[i])
    lines.append("<path class='line' d='M" + "L".join(f"{x_of(xs[i]):.1f} {y_of(ys[i]):.1f}" for i in along) + "'/>")
    for i in finite:
        kind = "out" if rows[i]["fits"] != "yes" else "front" if i in best_points else "point"
        words = html.escape(printable_name(f"{names[i]}: {x_words} {xs[i]:.4g}, {y_words} {ys[i]:.4g}"), quote=True)
        lines.append(
            f"<circle class='{kind}' cx='{x_of(xs[i]):.1f}' cy='{y_of(ys[i]):.1f}' "
            f"r='4'><title>{words}</title></circle>"
        )
        if rows[i] is best:
            lines.append(f"<circle class='best' cx='{x_of(xs[i]):.1f}' cy='{y_of(ys[i]):.1f}' r='8'/>")
    return "\n".join([*lines, "</svg>"])


class _scale:
    """Figures to places on a page, with a little room at both ends."""

    def __init__(self, values: list[float], begin: float, end: float):
        room = (max(values) - min(values)) * 0.06 or abs(max(values)) * 0.06 or 1.0
        self.low, self.high = max(0.0, min(values) - room), max(values) + room
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        return self._begin + (self._end - self._begin) * (value - self.low) / (self.high - self.low)


def _table(rows: list[dict[str, str]], axes: list[str], best: dict[str, str] | None) -> str:
    columns = [*axes, *(name for name in rows[0] if name not in axes)] if rows else axes
    lines = ["<table>", "<tr>" + "".join(f"<th>{html.escape(column)}</th>" for column in columns) + "</tr>"]
    for row in sorted(rows, key=lambda row: -float(row["tokens_per_second"] or 0)):
        cells = "".join(f"<td>{html.escape(printable_name(row[column]))}</td>" for column in columns)
        lines.append(f"<tr{' class=best' if row is best else ''}>{cells}</tr>")
    return "\n".join([*lines, "</table>"])
