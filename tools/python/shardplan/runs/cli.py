# SPDX-License-Identifier: Apache-2.0
"""The command `python -m shardplan.runs`, which `shardplan cost --builder` runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path

from shardplan import files
from shardplan.command import EXIT_ENVIRONMENT, ArgumentParser, file_name, printable_name
from shardplan.runs import documents, fit, show, table
from shardplan.runs.figures import FIGURES, named
from shardplan.runs.predict import NoCommand, Simulator, Traces
from shardplan.runs.table import BadTable, Run

MOST_FIGURES = 4
DEFAULT_FIGURES = "matmul,attention,memory,spread"
_SILENT_SECONDS = 5


def _pair(text: str) -> tuple[str, str]:
    gpu, equals, name = text.partition("=")
    if not gpu or not equals or not name:
        raise argparse.ArgumentTypeError(f"found {text}, expected GPU=FILE or GPU=NAME")
    return gpu, name


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 7 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"found {text}, expected a number of rows, 1 or more")
    return int(text)


def parser() -> argparse.ArgumentParser:
    result = ArgumentParser(
        prog="shardplan cost",
        description=(
            "Training runs: predicted next to measured, and few figures of a cluster fitted to some of them "
            "(docs/reference/cost.md)."
        ),
    )
    result.add_argument("table", metavar="RUNS.csv", type=file_name)
    result.add_argument(
        "--builder", required=True, metavar="SOURCE", help="package.module:callable: gets a row, returns the model"
    )
    result.add_argument(
        "--cluster-of", type=_pair, action="append", default=[], metavar="GPU=NAME",
        help="the cluster of a GPU kind (default: the one called as the GPU)",
    )
    result.add_argument("--cluster", type=file_name, metavar="FILE|NAME", help="the cluster of all others")
    result.add_argument("--fit-rows", type=_count, metavar="N", help="fit to so many rows of each GPU kind")
    result.add_argument(
        "--figures",
        type=lambda text: named(text, MOST_FIGURES),
        metavar="NAME,...",
        help=f"what is fitted, of {', '.join(FIGURES)} (default: {DEFAULT_FIGURES})",
    )
    result.add_argument(
        "-o", "--output", type=file_name, metavar="FOLDER", help="where the fitted clusters go, GPU.json each"
    )
    result.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")
    return result


def _log(text: str) -> None:
    print(f"shardplan cost: {printable_name(text)}", file=sys.stderr, flush=True)


def main() -> int:
    options = parser().parse_args()
    if options.fit_rows is None and (options.output or options.figures):
        parser().error(
            f"{'-o' if options.output else '--figures'} is of a fit: --fit-rows says to how many rows of each GPU kind"
        )
    try:
        return _run(options)
    except BadTable as error:
        _log(f"error: {error}")
        return 3
    except (NoCommand, files.CannotWrite) as error:
        _log(f"error: {error}")
        return EXIT_ENVIRONMENT


class _Progress:
    """A line at most every few seconds."""

    def __init__(self, quiet: bool):
        self._quiet, self._begin, self._last = quiet, time.monotonic(), -math.inf

    def __call__(self, text: str, always: bool = False) -> None:
        now = time.monotonic()
        if not self._quiet and (always or now - self._last > _SILENT_SECONDS):
            self._last = now
            _log(f"{text} ({now - self._begin:.0f} s)")


def _run(options: argparse.Namespace) -> int:
    runs = table.read(options.table)
    progress = _Progress(options.quiet)
    if options.output:
        _check_folder(options.output)
    named = dict(options.cluster_of)
    kinds = list(dict.fromkeys(run.gpu for run in runs))
    for gpu in named:
        if gpu not in kinds:
            _log(f"warning: --cluster-of: no row has this GPU (found {gpu}, expected {', '.join(kinds)})")
    with tempfile.TemporaryDirectory(prefix="shardplan-cost-") as folder:
        traces = Traces(options.builder, Path(folder))
        with contextlib.closing(Simulator(traces)) as simulator:
            clusters = {gpu: named.get(gpu) or options.cluster or gpu for gpu in kinds}
            paths = {gpu: _path(simulator, runs, gpu, clusters[gpu]) for gpu in kinds}
            progress("loading torch and the builder")
            with contextlib.redirect_stdout(sys.stderr):  # what a builder prints is no part of the table
                _trace(traces, runs, options.table, progress)
            fits, texts = {}, {}
            if options.fit_rows is not None:
                for gpu in kinds:
                    fits[gpu] = _fit(options, simulator, runs, gpu, documents.read(paths[gpu]), folder, progress)
                    paths[gpu] = str(Path(folder) / f"fitted{len(fits)}.json")
                    files.write_text(paths[gpu], json.dumps(fits[gpu].document))
                    texts[gpu] = simulator.canonical(paths[gpu])
            predicted = []
            for i, run in enumerate(runs):
                progress(f"{options.table}: {i} of {len(runs)} rows simulated")
                predicted.append(simulator.tokens_per_second(run, paths[run.gpu]))
    print(show.text(runs, predicted, clusters, fits), end="")
    if options.output:
        _write(options, texts)
    return 0


def _check_folder(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise files.CannotWrite(f"cannot make the folder {folder}: {error.strerror}") from error


def _path(simulator: Simulator, runs: list[Run], gpu: str, cluster: str) -> str:
    """The document of a GPU kind, for the most GPUs that a row has."""
    of_kind = [run for run in runs if run.gpu == gpu]
    path, refused = simulator.cluster_path(cluster, max(run.cells["gpus"] for run in of_kind))
    if refused:
        known = refused.rpartition("expected ")[2].rstrip(")")
        raise of_kind[0].wrong(f"no cluster is called so: --cluster-of {gpu}=NAME names one", cluster, known)
    return path


def _trace(traces: Traces, runs: list[Run], name: str, progress: _Progress) -> None:
    for run in runs:
        traces.plan_flags(run)
    for i, run in enumerate(runs):
        progress(f"{name}: {i} of {len(runs)} rows traced")
        parameters = traces.model(run).parameters
        told = run.cells.get("parameters")
        if type(told) is int and abs(parameters - told) > 0.01 * told:
            _log(
                f"warning: {run.path}: /line/{run.line}: the builder's model has another number of parameters (found "
                f"{parameters}, expected {told})"
            )


def _fit(
    options: argparse.Namespace,
    simulator: Simulator,
    runs: list[Run],
    gpu: str,
    document: dict,
    folder: str,
    progress: _Progress,
) -> fit.Fit:
    names = options.figures or DEFAULT_FIGURES.split(",")
    of_kind = [i for i, run in enumerate(runs) if run.gpu == gpu]
    made = 0

    def predict(changed: dict, rows: list[int]) -> list[float]:
        nonlocal made
        made += 1
        path = str(Path(folder) / f"{gpu_file(gpu)}.{made}.json")
        files.write_text(path, json.dumps(changed))
        rates = []
        for row in rows:
            progress(f"fitting {gpu}: {made} clusters tried")
            rates.append(math.log(simulator.tokens_per_second(runs[row], path)))
        os.remove(path)
        return rates

    if all(
        len(document.get("links", [])) < 2 or runs[i].cells["gpus"] <= document.get("ranks_per_node", 8)
        for i in of_kind
    ):
        names = [name for name in names if name != "network"]
    rows = fit.chosen(document, names, of_kind, options.fit_rows, predict)
    fitted = fit.fit(document, names, rows, [math.log(runs[i].tokens_per_second) for i in rows], predict)
    documents.say_sources(fitted, f"{len(rows)} training runs of {os.path.basename(options.table)}")
    return fitted


def gpu_file(gpu: str) -> str:
    """The GPU's name as a file's."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in gpu).lstrip(".") or "gpu"


def _write(options: argparse.Namespace, texts: dict[str, str]) -> None:
    for gpu, text in texts.items():
        path = str(Path(options.output) / f"{gpu_file(gpu)}.json")
        files.write_text(path, text)
        if not options.quiet:
            _log(f"wrote {path}")
