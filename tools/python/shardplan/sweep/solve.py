# SPDX-License-Identifier: Apache-2.0
"""The largest or smallest value of one axis that fits, by bisection."""

from __future__ import annotations

from collections.abc import Callable

from shardplan.sweep.configurations import Configuration

# Questions: the axis, whether more of it needs more memory, and the step that values are multiples of.
QUESTIONS = {"max-batch": ("batch", True, 1), "max-seq": ("seq", True, 128), "min-ranks": ("ranks", False, 1)}
_MOST = 1 << 24
_FEW_RANKS = 8  # below, what one more doubling gives says nothing of the next


def solve(
    question: str,
    base: Configuration,
    evaluate: Callable[[Configuration], dict],
    releases: bool = False,
    most: int = _MOST,
) -> tuple[Configuration | None, dict]:
    """The configuration and its results; None with the results of the smallest (for ranks: the most that was tried)
    where none fits, and why ("why").

    A plan that releases the allocator's cache fits only if `releases` is set. Memory grows with batch and sequence, so
    doubling finds a value that does not fit and bisection the border. It falls with ranks, but not where they do not
    divide what is sharded evenly: the answer is the border of the bisection, with all numbers above it by doubling."""
    axis, grows, step = QUESTIONS[question]
    known: dict[int, dict] = {}

    def fits(units: int) -> bool:
        if units not in known:
            known[units] = evaluate(base.replace(axis, units * step))
        row = known[units]
        return row.get("fits") == "yes" and (releases or not int(row["cache_releases"]))

    if not grows:
        return _least(axis, step, base, fits, known, most)
    if not fits(1):
        return None, known[1]
    low = 1
    while low * 2 * step <= most and fits(low * 2):
        low *= 2
    low, _ = _border(low, low * 2, fits)  # twice that does not fit, or is beyond the most
    return base.replace(axis, low * step), known[low]


def _least(
    axis: str, step: int, base: Configuration, fits: Callable[[int], bool], known: dict[int, dict], most: int
) -> tuple[Configuration | None, dict]:
    high = 1
    while not fits(high):
        if why := _why_more_do_not_help(high, known):
            return None, known[high] | {"why": why}
        if high * 2 * step > most:
            return None, known[high]
        high *= 2
    _, high = _border(high // 2, high, lambda units: not fits(units))  # half of it does not fit; 0: one is enough
    return base.replace(axis, high * step), known[high]


def _why_more_do_not_help(ranks: int, known: dict[int, dict]) -> str:
    """"": they may. Each doubling gives half of what the last one gave, so all that follow give as much as it did;
    twice that has to be enough."""
    row, half = known[ranks], known.get(ranks // 2, {})
    if why := row.get("why"):
        return why
    budget = row.get("budget_gib")
    if ranks <= _FEW_RANKS or budget is None or "reserved_gib" not in row or "reserved_gib" not in half:
        return ""
    now, before = float(row["reserved_gib"]), float(half["reserved_gib"])
    if now - 2 * (before - now) <= budget:
        return ""
    return (
        f"more ranks do not help: {ranks // 2} reserve {before:.3f} GiB each, {ranks} {now:.3f} GiB, of {budget:.3f} "
        "GiB"
    )


def _border(low: int, high: int, holds: Callable[[int], bool]) -> tuple[int, int]:
    """Neighbours between `low`, where it holds, and `high`, where it does not."""
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low, high
