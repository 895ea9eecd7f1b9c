"""What a sweep has done: rows of a CSV file, each whole or not there."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

from shardplan.sweep.configurations import Configuration

RESULTS = (
    "step_ms", "tokens_per_second", "tokens_per_second_per_rank", "utilization_percent", "exposed_ms", "peak_gib", "needed_gib", "fits", "error",
)  # fmt: skip


class OtherSweep(Exception):
    """The file holds rows of other axes."""


class Rows:
    """Rows that are done, in a file to which each is appended when it is."""

    def __init__(self, path: str, axes: list[str]):
        self.columns = [*axes, *RESULTS]
        self.axes = axes
        self.path = Path(path)
        self.done: dict[Configuration, dict[str, str]] = {}
        if self.path.exists() and self.path.stat().st_size > 0:
            self._read()
            self._file = open(self.path, "a", newline="", encoding="utf-8")  # noqa: SIM115
        else:
            self._file = open(self.path, "w", newline="", encoding="utf-8")  # noqa: SIM115
            self._append(self.columns)

    def _read(self) -> None:
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]  # a killed sweep leaves part of a line
        rows = list(csv.reader(io.StringIO(whole.decode("utf-8"))))
        if not rows or rows[0] != self.columns:
            raise OtherSweep(f"{self.path}: the rows are of another sweep (found {','.join(rows[0]) if rows else 'nothing'}, expected {','.join(self.columns)})")
        if len(whole) < len(text):
            with open(self.path, "r+b") as file:
                file.truncate(len(whole))
        for row in rows[1:]:
            if len(row) == len(self.columns):
                values = dict(zip(self.columns, row, strict=True))
                self.done[Configuration(tuple((axis, values[axis]) for axis in self.axes))] = values

    def add(self, configuration: Configuration, results: dict[str, object]) -> None:
        values = dict(configuration.values) | {name: str(results.get(name, "")) for name in RESULTS}
        self.done[configuration] = values
        self._append([values[column] for column in self.columns])

    def _append(self, cells: list[str]) -> None:
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(cells)
        self._file.write(line.getvalue())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def merged(paths: list[str]) -> str:
    """The rows of several files of one sweep, each configuration once, in order of the files."""
    columns, rows = None, {}
    for path in paths:
        with open(path, newline="", encoding="utf-8") as file:
            found = list(csv.reader(file))
        if not found or found[0][-len(RESULTS) :] != list(RESULTS) or columns not in (None, found[0]):
            raise OtherSweep(f"{path}: the rows are of another sweep (found {','.join(found[0])[:200] if found else 'nothing'}, expected {','.join(columns or RESULTS)} at the end)")
        columns = found[0]
        axes = len(columns) - len(RESULTS)
        for row in found[1:]:
            if len(row) == len(columns):
                rows.setdefault(tuple(row[:axes]), row)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows.values()])
    return text.getvalue()
