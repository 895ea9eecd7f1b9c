# SPDX-License-Identifier: Apache-2.0
"""Few figures of a cluster fitted to measured reports: `shardplan calibrate --from measured.json --plan plan.json`.

[Note: quantities] A report tells more than its step: how long kernels of each class ran, each kind of collective
without the time in which the rank waited for others, and the step. Each that is a hundredth of the step or more is one
thing that the simulator predicts, and the fit is that of training runs (runs/fit.py).
"""

from __future__ import annotations

import collections
import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardplan import files
from shardplan.command import NoCommand, built_command, printable
from shardplan.runs import documents, fit
from shardplan.runs.figures import FIGURES
from shardplan.runs.table import BadTable

from .fit import BadMeasurements

REPORT_SCHEMA = "shardplan.report/1"
DEFAULT_FIGURES = ("matmul", "attention", "memory", "host", "inner_link", "network")
_LEAST_PART = 0.01
_PROGRESS_SECONDS = 2
_KERNELS = {"matmul": "products of matrices", "convolution": "products of matrices", "attention": "attention"}
_REST, _OPTIMIZER, _STEP = "other kernels", "the optimizer", "the step"
_ALL, _COPIES = "forward and backward", "copies"


@dataclass
class Measured:
    """A measured report, and the plan that it is of."""

    path: str
    plan: str
    report: dict


def is_report(document: object) -> bool:
    return isinstance(document, dict) and document.get("schema") == REPORT_SCHEMA


def _tells_classes(report: dict) -> bool:
    """A plan that measures itself knows the model's work between two instructions, and not its operators."""
    return all(entry["kind"] != "segment" for entry in report.get("operators", []))


def _quantities(report: dict, by_class: bool) -> dict[str, float]:
    """ns of what the simulator predicts, too."""
    times: dict[str, float] = collections.defaultdict(float)
    for entry in report.get("operators", []):
        name = _OPTIMIZER if entry["phase"] == "optimizer" else _KERNELS.get(entry["kind"], _REST) if by_class else _ALL
        times[name] += entry["busy_ns"]
    measured = report.get("measured", {})
    waiting = measured.get("waiting_ns", 0) / report["communication_ns"] if report["communication_ns"] else 0
    if measured.get("device") == "CPU":
        waiting = 0  # ranks that share cores are late by turns: that is what a collective takes there
    # How long the rank waited is known of all of them together, so kinds are not told apart.
    for entry in report["collectives"]:
        times[f"collectives of {entry['communicator']}"] += entry["busy_ns"] * (1 - waiting)
    for entry in report.get("activities", []):
        # Copies while nothing else runs: the only figure that tells memory from arithmetic in a report without classes.
        if entry["activity"] == "copies" and not by_class:
            times[_COPIES] = entry["time_ns"]
    times[_STEP] = report["step_ns"]
    return dict(times)


def _ask(*words: str, text: str | None = None) -> subprocess.CompletedProcess:
    """A command of this build, with the text on its standard input."""
    return subprocess.run([built_command("calibrate"), *words], input=text, capture_output=True, text=True, check=False)


def _simulated(plan: str, *more: str) -> dict:
    done = _ask("simulate", plan, *more, "--report", "-", "-q", "--no-verify")
    if done.returncode not in (0, 1) or not done.stdout:
        raise BadMeasurements(f"{plan}: cannot be simulated: {_last_line(done.stderr)}")
    return json.loads(done.stdout)


class Prediction:
    """Simulates the plans on cluster documents."""

    def __init__(self, measured: list[Measured], folder: str, say: Callable[[str], None]):
        self._measured, self._folder, self._say = measured, folder, say
        self._said = time.monotonic()
        self.tried = 0

    def reports(self, document: dict) -> list[dict]:
        self.tried += 1
        if time.monotonic() - self._said > _PROGRESS_SECONDS:
            self._said = time.monotonic()
            self._say(f"fitting: {self.tried} clusters tried")
        path = str(Path(self._folder) / f"{self.tried}.json")
        files.write_text(path, json.dumps(document))
        try:
            return [_simulated(one.plan, "--cluster", path) for one in self._measured]
        finally:
            os.remove(path)


def _last_line(text: str) -> str:
    return printable(
        text.strip().splitlines()[-1].removeprefix("shardplan: error: ") if text.strip() else "no reason was given"
    )


def _plan_document(path: str) -> dict:
    done = _ask("show", path, "--json", "-o", "-")
    if done.returncode or not done.stdout:
        raise BadMeasurements(_last_line(done.stderr))
    return json.loads(done.stdout)


def paired(reports: list[tuple[str, dict]], plans: list[str]) -> tuple[list[Measured], dict]:
    """Each report with its plan, by the digest where there are several; and the first plan's cluster."""
    if not plans:
        raise BadMeasurements(
            f"{reports[0][0]}: a report is fitted through its plan (found no --plan, expected the plan that "
            "import-profile was given)"
        )
    digests = {_simulated(path).get("plan_digest", ""): path for path in plans}
    made = []
    for path, report in reports:
        wanted = report.get("plan_digest", "")
        if wanted not in digests:
            raise BadMeasurements(
                f"{path}: /plan_digest: no --plan is the one that this was measured with (found {wanted or 'none'}, "
                f"expected {', '.join(digests)})"
            )
        made.append(Measured(path, digests[wanted], report))
    return made, _plan_document(plans[0])["cluster"]


def check(path: str, report: dict) -> None:
    """Raises BadMeasurements where it is no measured report of the schema."""
    done = _ask("validate", "/dev/stdin", text=json.dumps(report))
    if done.returncode:
        raise BadMeasurements(f"{path}: {_last_line(done.stderr).replace('/dev/stdin: ', '')}")
    if not report.get("measured", {}).get("device"):
        raise BadMeasurements(
            f"{path}: /measured: nothing is measured here (found a simulated report, expected one of import-profile)"
        )


def fitted(
    reports: list[tuple[str, dict]],
    plans: list[str],
    base: str | None,
    names: list[str] | None,
    say: Callable[[str], None],
) -> tuple[str, str]:
    """The cluster document, and a table of what was predicted before and after. `say` hears of progress."""
    for path, report in reports:
        check(path, report)
    measured, cluster = paired(reports, plans)
    try:
        document = documents.read(base) if base else {**cluster, "schema": "shardplan.cluster/1"}
    except BadTable as error:
        raise BadMeasurements(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="shardplan-calibrate-") as folder:
        prediction = Prediction(measured, folder, say)
        before = prediction.reports(document)
        by_class = [_tells_classes(one.report) for one in measured]

        def quantities(predicted: list[dict]) -> list[dict[str, float]]:
            return [_quantities(report, tells) for report, tells in zip(predicted, by_class)]

        known, told = quantities(before), quantities([one.report for one in measured])
        rows = [
            (i, name)
            for i, one in enumerate(measured)
            for name, time in told[i].items()
            if time >= _LEAST_PART * one.report["step_ns"] and known[i].get(name, 0) > 0
        ]

        def predict(changed: dict, wanted: list[int]) -> list[float]:
            times = quantities(prediction.reports(changed))
            return [-math.log(max(1.0, times[rows[k][0]].get(rows[k][1], 0))) for k in wanted]

        every = list(range(len(rows)))
        chosen = [
            name for name in (names or DEFAULT_FIGURES) if name != "network" or len(document.get("links", [])) > 1
        ]
        made = fit.fit(document, chosen, every, [-math.log(told[i][name]) for i, name in rows], predict)
        documents.say_sources(made, f"{len(measured)} measured {'step' if len(measured) == 1 else 'steps'}")
        after = quantities(prediction.reports(made.document))
        path = str(Path(folder) / "made.json")
        files.write_text(path, json.dumps(made.document))
        done = _ask("evaluate", text=json.dumps({"document": path}) + "\n")
        answer = json.loads(done.stdout or "{}")
        if "text" not in answer:
            raise NoCommand(f"the fitted cluster cannot be written: {answer.get('error', _last_line(done.stderr))}")
    return answer["text"], _table(measured, rows, told, known, after, made)


def _table(
    measured: list[Measured],
    rows: list[tuple[int, str]],
    told: list[dict],
    before: list[dict],
    after: list[dict],
    made: fit.Fit,
) -> str:
    lines = []
    for i, one in enumerate(measured):
        lines.append(f"{one.path}: {one.report['measured']['device']}, {one.report['world_size']} ranks")
        lines.append(f"  {'':<30} {'measured':>10} {'before':>10} {'':>8} {'fitted':>10} {'':>8}")
        for k, name in rows:
            if k != i:
                continue
            real = told[i][name]
            sides = [
                f"{one_side[i][name] / 1e6:>10.3f} {one_side[i][name] / real - 1:>+8.1%}"
                for one_side in (before, after)
            ]
            lines.append(f"  {name:<30} {real / 1e6:>10.3f} {sides[0]} {sides[1]}")
    lines.append("")
    for figure in made.figures:
        words = FIGURES[figure.name]
        said = (
            f"{words.words}, {words.worse if figure.factor < 1 else words.better}"
            if figure.told
            else "these steps do not tell it"
        )
        lines.append(
            f"  {figure.name:<10} x {figure.factor:.3f} ({figure.low:.3f} to {figure.high:.3f} two times in three): "
            f"{said}"
        )
    blamed = [figure for figure in made.figures if figure.told and abs(figure.moves) >= _LEAST_PART / 2]
    if blamed:
        most = max(blamed, key=lambda figure: abs(math.log(figure.factor)))
        lines.append(f"  the blame is mostly that of {most.name} ({FIGURES[most.name].words})")
    else:
        lines.append("  no figure is to blame: the cluster predicts these steps as it is")
    return "\n".join(lines) + "\n"
