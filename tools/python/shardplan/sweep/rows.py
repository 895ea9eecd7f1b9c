# SPDX-License-Identifier: Apache-2.0
"""Results of a sweep: rows of a CSV file, each whole or not there."""

from __future__ import annotations

import csv
import io

from shardplan import files
from shardplan.sweep.configurations import Configuration

RESULTS = (
    "step_ms", "tokens_per_second", "tokens_per_second_per_rank", "utilization_percent", "exposed_ms", "peak_gib",
    "reserved_gib", "needed_gib", "cache_releases", "fits", "error",
)


class BadRows(Exception):
    """The file cannot be read, or holds no rows of a sweep, or those of other axes."""


class Rows:
    """Rows that are done, in a file to which each is appended when it is."""

    def __init__(self, path: str, axes: list[str]):
        self.columns = [*axes, *RESULTS]
        self.axes = axes
        self.done: dict[Configuration, dict[str, str]] = {}
        self._log = files.LineLog(path)
        try:
            found = list(csv.reader(io.StringIO(self._log.text)))
        except csv.Error as error:
            self._log.close()
            raise BadRows(f"{path}: no rows of a sweep: {error}") from error
        if not found:
            self._append([self.columns])
        elif found[0] != self.columns:
            self._log.close()
            raise BadRows(
                f"{path}: the rows are of another sweep (found {','.join(found[0])[:200]}, expected "
                f"{','.join(self.columns)})"
            )
        for row in found[1:]:
            if len(row) == len(self.columns):
                values = dict(zip(self.columns, row, strict=True))
                self.done[Configuration(tuple((axis, values[axis]) for axis in self.axes))] = values

    def add(self, rows: list[tuple[Configuration, dict[str, object]]]) -> None:
        """Adds finished rows together: each call is a write to the disk."""
        cells = []
        for configuration, results in rows:
            if configuration in self.done:
                continue
            values = dict(configuration.values) | {name: str(results.get(name, "")) for name in RESULTS}
            self.done[configuration] = values
            cells.append(self._cells(configuration))
        if cells:
            self._append(cells)

    def _cells(self, configuration: Configuration) -> list[str]:
        return [self.done[configuration][column] for column in self.columns]

    def _append(self, rows: list[list[str]]) -> None:
        self._log.append(_text(rows))

    def close(self, ordered: list[Configuration]) -> None:
        """At the end of a sweep. `ordered`: all that is done; the file gets that order, whichever came to an end
        first."""
        moved = ordered != list(self.done)
        self.done = {configuration: self.done[configuration] for configuration in ordered}
        self._log.end(_text([self.columns, *map(self._cells, ordered)]) if moved else None)


def _text(rows: list[list[str]]) -> str:
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows(rows)
    return lines.getvalue()


def merged(paths: list[str]) -> str:
    """The rows of several files of one sweep, each configuration once, in order of the files."""
    columns, rows = None, {}
    for path in paths:
        found = _cells(path)
        if not found or found[0][-len(RESULTS) :] != list(RESULTS) or columns not in (None, found[0]):
            raise BadRows(
                f"{path}: the rows are of another sweep (found {','.join(found[0])[:200] if found else 'nothing'}, "
                f"expected {','.join(columns or RESULTS)} at the end)"
            )
        columns = found[0]
        axes = len(columns) - len(RESULTS)
        for row in found[1:]:
            if len(row) == len(columns):
                rows.setdefault(tuple(row[:axes]), row)
    return _text([columns, *rows.values()])


def _cells(path: str) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(files.read_text(path), newline="")))
    except OSError as error:
        raise BadRows(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadRows(f"{path}: no rows of a sweep: {error}") from error


def read(path: str) -> tuple[list[dict[str, str]], list[str]]:
    """The rows of a file of a sweep, and its axes."""
    with open(path, newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
        axes = [name for name in found[0] if name not in RESULTS] if found else []
    return found, axes
