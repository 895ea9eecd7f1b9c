# SPDX-License-Identifier: Apache-2.0
"""The printed table: rows, what was fitted, and how far the others are off."""

from __future__ import annotations

import math
import statistics
import os

from shardplan.command import printable_name
from shardplan.runs.figures import FIGURES
from shardplan.runs.fit import Fit, FittedFigure
from shardplan.runs.table import Run

LONG_SEQUENCE = 8192
_NODE = 8
_MANY = 128


def text(runs: list[Run], predicted: list[float], clusters: dict[str, str], fits: dict[str, Fit]) -> str:
    fitted = {row for fit in fits.values() for row in fit.rows}
    errors = [p / run.tokens_per_second - 1 for run, p in zip(runs, predicted, strict=True)]
    wide = max(9, *(len(printable_name(run.gpu)) for run in runs))
    lines = [
        f"{'line':>4} {'gpu':<{wide}} {'gpus':>5} {'model':<6} {'sequence':>8} {'micro':>6} {'x':>4} {'sharding':<13} "
        f"{'ckpt':<5} {'measured':>9} {'predicted':>9} {'error':>8}"
    ]
    for i, run in enumerate(runs):
        cells = run.cells
        lines.append(
            f"{run.line:>4} {printable_name(run.gpu):<{wide}} {cells['gpus']:>5} "
            f"{printable_name(str(cells.get('model', '-'))):<6} {cells['sequence']:>8} {cells['micro_batch']:>6} "
            f"{cells['micro_batches']:>4} {cells['sharding']:<13} {str(cells['activation_checkpointing']).lower():<5} "
            f"{run.tokens_per_second:>9.0f} {predicted[i]:>9.0f} {errors[i]:>+8.1%}"
            + (" fitted" if i in fitted else "")
        )
    for gpu, fit in fits.items():
        lines += ["", *_fit_lines(gpu, clusters[gpu], fit, [runs[i].line for i in fit.rows])]
    rest = [(run, errors[i]) for i, run in enumerate(runs) if i not in fitted]
    kinds = list(dict.fromkeys(run.gpu for run in runs))
    lines.append("")
    if fits:
        lines += [_summary(gpu, "rows fitted to", [errors[i] for i in fit.rows]) for gpu, fit in fits.items()]
    for gpu in kinds:
        for words, belongs in _GROUPS:
            group = [error for run, error in rest if run.gpu == gpu and belongs(run)]
            if group:
                lines.append(_summary(gpu, words, group))
    others = "other rows" if fits else "rows"
    lines += [_summary(gpu, others, [error for run, error in rest if run.gpu == gpu]) for gpu in kinds]
    return "\n".join(lines) + "\n"


_GROUPS = (
    (f"sequences below {LONG_SEQUENCE}", lambda run: run.cells["sequence"] < LONG_SEQUENCE),
    (f"sequences from {LONG_SEQUENCE}", lambda run: run.cells["sequence"] >= LONG_SEQUENCE),
    (f"up to {_NODE} GPUs", lambda run: run.cells["gpus"] <= _NODE),
    (f"{_NODE + 1} to {_MANY - 1} GPUs", lambda run: _NODE < run.cells["gpus"] < _MANY),
    (f"from {_MANY} GPUs", lambda run: run.cells["gpus"] >= _MANY),
)


def _summary(gpu: str, words: str, errors: list[float]) -> str:
    head = f"{printable_name(gpu):<12} {words:<21} {len(errors):>4} rows"
    if not errors:
        return head
    ascending, signed = sorted(map(abs, errors)), sorted(errors)
    ninety = ascending[math.ceil(0.9 * len(ascending)) - 1]
    return (
        f"{head}   median {statistics.median(ascending):>6.1%}   90th percentile {ninety:>6.1%}   worst "
        f"{ascending[-1]:>6.1%}   in the middle {statistics.median(signed):>+6.1%}"
    )


def _fit_lines(gpu: str, cluster: str, fit: Fit, lines: list[int]) -> list[str]:
    told = sorted((figure for figure in fit.figures if figure.told), key=lambda figure: -abs(figure.moves))
    made = [
        f"{printable_name(gpu)}: {printable_name(os.path.basename(cluster))} fitted to {len(lines)} rows, lines "
        f"{', '.join(map(str, lines))}"
    ]
    for figure in fit.figures:
        made.append(
            f"  {figure.name:<10} x {figure.factor:.3f} ({figure.low:.3f} to {figure.high:.3f} two times in three): "
            f"{_words(figure)}"
        )
    if told and abs(told[0].moves) >= 0.01:
        way = "fewer" if told[0].moves < 0 else "more"
        made.append(
            f"  the blame is mostly that of {told[0].name} ({FIGURES[told[0].name].words}): "
            f"{abs(math.expm1(told[0].moves)):.0%} {way} tokens a second in these rows"
        )
    else:
        made.append("  no figure is to blame: the cluster predicts these rows as it is")
    return made


def _words(figure: FittedFigure) -> str:
    if not figure.told:
        return "these rows do not tell it"
    change = math.expm1(figure.moves)
    described = FIGURES[figure.name]
    return (
        f"{described.words}, {described.worse if figure.factor < 1 else described.better}; {change:+.1%} tokens a "
        "second"
    )
