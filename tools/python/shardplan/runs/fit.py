# SPDX-License-Identifier: Apache-2.0
"""Few figures of a cluster fitted to runs: which runs, the factors, their intervals.

[Note: robust, and held by what is known] The fit minimises

    sum over rows of huber((log measured - log predicted) / SCATTER)  +  sum over figures of (log factor / HELD)^2 / 2

Huber's function keeps one odd run from moving the figures. HELD moves a figure that the rows tell by next to nothing,
and keeps one that they do not tell where it was. Gauss-Newton steps with differences of the simulator itself; nothing
is drawn by chance.

[Note: which rows] The rows are chosen by what the simulator says that they tell (greedily the largest determinant of
the information matrix, D-optimality), before anything measured is looked at.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from shardplan.runs.figures import scaled

# By how much a published run differs from its repetition, about.
SCATTER = 0.02
HELD = 0.5
_HUBER = 1.345  # 95 % as efficient as least squares where all is normal
_DIFFERENCE = -0.05  # of a logarithm; some figures cannot become better than they are
_STEPS = 12
_LONGEST = 0.5
_TOLD = 0.7  # of HELD, or less: the rows tell a figure
_ENOUGH = 1e-4

# Logarithms of predicted rates, by the rows' indices and a document.
Predict = Callable[[dict, list[int]], list[float]]


@dataclass
class FittedFigure:
    name: str
    factor: float
    low: float  # two times in three within low to high
    high: float
    told: bool  # the rows say where it is
    moves: float  # the mean of what it alone changes in the rows' predictions


@dataclass
class Fit:
    figures: list[FittedFigure]
    document: dict
    rows: list[int]


def fit(document: dict, names: list[str], rows: list[int], measured: list[float], predict: Predict) -> Fit:
    """`rows`: indices; `measured`: the logarithm of each one's rate."""
    logs = [0.0] * len(names)
    for _ in range(_STEPS):
        now, slopes = _slopes(document, names, logs, rows, predict)
        information, pull = _normal(slopes, [m - p for m, p in zip(measured, now, strict=True)])
        for i, value in enumerate(logs):
            information[i][i] += 1 / HELD**2
            pull[i] -= value / HELD**2
        step = [max(-_LONGEST, min(_LONGEST, s)) for s in solved(information, pull)]
        logs = [value + s for value, s in zip(logs, step, strict=True)]
        if max(map(abs, step)) < _ENOUGH:
            break
    made = scaled(document, _factors(names, logs))
    now = predict(made, rows)
    residuals = sorted(abs(m - p) for m, p in zip(measured, now, strict=True))
    wider = max(1.0, 1.4826 * statistics.median(residuals) / SCATTER)
    figures = []
    for i, name in enumerate(names):
        spread = wider * math.sqrt(solved(information, [float(i == j) for j in range(len(names))])[i])
        without = predict(
            scaled(document, _factors(names, [0.0 if i == j else value for j, value in enumerate(logs)])), rows
        )
        moves = sum(p - q for p, q in zip(now, without, strict=True)) / len(rows)
        told = spread < _TOLD * HELD
        figures.append(
            FittedFigure(name, math.exp(logs[i]), math.exp(logs[i] - spread), math.exp(logs[i] + spread), told, moves)
        )
    return Fit(figures, made, rows)


def chosen(document: dict, names: list[str], rows: list[int], count: int, predict: Predict) -> list[int]:
    """`count` of the rows, in their order."""
    if len(rows) <= count:
        return list(rows)
    _, slopes = _slopes(document, names, [0.0] * len(names), rows, predict)
    size = len(names)
    information = [[1 / HELD**2 if i == j else 0.0 for j in range(size)] for i in range(size)]
    left = list(range(len(rows)))
    taken = []
    for _ in range(count):
        # By the matrix determinant lemma, the determinant grows by 1 + g' information^-1 g.
        gains = [sum(g * x for g, x in zip(slopes[k], solved(information, slopes[k]), strict=True)) for k in left]
        best = left.pop(max(range(len(left)), key=lambda k: (round(gains[k], 9), -k)))
        taken.append(best)
        for i in range(size):
            for j in range(size):
                information[i][j] += slopes[best][i] * slopes[best][j] / SCATTER**2
    return [rows[k] for k in sorted(taken)]


def _factors(names: list[str], logs: list[float]) -> dict[str, float]:
    return {name: math.exp(value) for name, value in zip(names, logs, strict=True)}


def _slopes(
    document: dict, names: list[str], logs: list[float], rows: list[int], predict: Predict
) -> tuple[list[float], list[list[float]]]:
    """The predictions, and for each row a list of their derivatives by each figure's logarithm."""
    now = predict(scaled(document, _factors(names, logs)), rows)
    columns = []
    for i in range(len(names)):
        moved = [value + (_DIFFERENCE if i == j else 0) for j, value in enumerate(logs)]
        columns.append(
            [
                (p - q) / _DIFFERENCE
                for p, q in zip(predict(scaled(document, _factors(names, moved)), rows), now, strict=True)
            ]
        )
    return now, [list(row) for row in zip(*columns, strict=True)]


def _normal(slopes: list[list[float]], residuals: list[float]) -> tuple[list[list[float]], list[float]]:
    size = len(slopes[0])
    information, pull = [[0.0] * size for _ in range(size)], [0.0] * size
    for slope, residual in zip(slopes, residuals, strict=True):
        weight = min(1.0, _HUBER * SCATTER / max(abs(residual), 1e-12)) / SCATTER**2
        for i in range(size):
            pull[i] += weight * slope[i] * residual
            for j in range(size):
                information[i][j] += weight * slope[i] * slope[j]
    return information, pull


def solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The x of matrix x = right, for a small positive definite matrix."""
    size = len(right)
    rows = [[*matrix[i], right[i]] for i in range(size)]
    for i in range(size):
        best = max(range(i, size), key=lambda k: abs(rows[k][i]))
        rows[i], rows[best] = rows[best], rows[i]
        for k in range(i + 1, size):
            part = rows[k][i] / rows[i][i]
            rows[k] = [a - part * b for a, b in zip(rows[k], rows[i], strict=True)]
    result = [0.0] * size
    for i in reversed(range(size)):
        result[i] = (rows[i][size] - sum(rows[i][j] * result[j] for j in range(i + 1, size))) / rows[i][i]
    return result
