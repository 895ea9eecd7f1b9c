# SPDX-License-Identifier: Apache-2.0
"""The table of training runs: comma-separated values whose first line names the columns."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shardplan import files

SHARDINGS = ("full_shard", "shard_grad_op", "no_shard")
_COUNTS = ("gpus", "sequence", "micro_batch", "micro_batches")
COLUMNS = ("gpu", *_COUNTS, "sharding", "activation_checkpointing", "tokens_per_second_per_gpu")
_MOST = {"gpus": 1 << 20, "sequence": (1 << 31) - 1, "micro_batch": (1 << 31) - 1, "micro_batches": 100_000}
_WORDS = {"true": True, "false": False}


class BadTable(Exception):
    """The table, or what the command was told of it, cannot be used: the text has file, line, found and expected."""


@dataclass
class Run:
    """One row. `cells`: every column, as number, bool or text."""

    path: str
    line: int
    cells: dict[str, object] = field(repr=False)

    @property
    def gpu(self) -> str:
        return self.cells["gpu"]

    @property
    def tokens_per_second(self) -> float:
        return self.cells["tokens_per_second_per_gpu"]

    def wrong(self, what: str, found: object, expected: str) -> BadTable:
        return wrong(self.path, self.line, what, found, expected)


class Asked(Mapping):
    """A row for a builder, which notes what is asked of it: rows that agree in that have one trace."""

    def __init__(self, cells: Mapping[str, object]):
        self._cells = cells
        self.answers: dict[str, object] = {}

    def __getitem__(self, column: str) -> object:
        self.answers[column] = self._cells[column]
        return self._cells[column]

    def __contains__(self, column: object) -> bool:
        return column in self._cells

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


def wrong(path: str, line: int, what: str, found: object, expected: str) -> BadTable:
    return BadTable(f"{path}: /line/{line}: {what} (found {str(found)[:200]}, expected {expected})")


def read(path: str) -> list[Run]:
    try:
        text = files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise BadTable(
            f"{path}: cannot be read: {error.strerror if isinstance(error, OSError) else 'it is no UTF-8'}"
        ) from error
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    names: list[str] = []
    runs = []
    try:
        for row in reader:
            values = [cell.strip() for cell in row]
            if not any(values):
                continue
            if not names:
                names = values
                _check_head(path, reader.line_num, names)
                continue
            runs.append(_run(path, reader.line_num, names, values))
    except csv.Error as error:
        raise wrong(
            path, reader.line_num, "the line is no comma-separated values", error, "cells separated by commas"
        ) from error
    if not runs:
        raise wrong(
            path,
            max(1, reader.line_num),
            "the table has no rows" if names else "the table is empty",
            "none",
            "a line that names the columns, and a row or more",
        )
    return runs


def _check_head(path: str, line: int, names: list[str]) -> None:
    for column in COLUMNS:
        if names.count(column) != 1:
            raise wrong(
                path,
                line,
                f"column {column} is {'missing' if column not in names else 'there twice'}",
                ",".join(names),
                ",".join(COLUMNS),
            )
    for name in names:
        if names.count(name) != 1:
            raise wrong(path, line, f"column {name} is there twice", ",".join(names), "each column once")


def _run(path: str, line: int, names: list[str], values: list[str]) -> Run:
    if len(values) != len(names):
        raise wrong(
            path, line, "the row has another number of cells than there are columns", len(values), str(len(names))
        )
    run = Run(path, line, {name: _value(text) for name, text in zip(names, values, strict=True)})
    cells, texts = run.cells, dict(zip(names, values, strict=True))
    for column in _COUNTS:
        if type(cells[column]) is not int or not 1 <= cells[column] <= _MOST[column]:
            raise run.wrong(f"{column} is not a number", texts[column], f"an integer from 1 to {_MOST[column]}")
    measured = cells["tokens_per_second_per_gpu"]
    if type(measured) not in (int, float) or not 0 < measured < 1e12:
        raise run.wrong(
            "tokens_per_second_per_gpu is not a number", texts["tokens_per_second_per_gpu"], "a number above 0"
        )
    if not texts["gpu"]:
        raise run.wrong("gpu is empty", "nothing", "a name")
    cells["gpu"] = texts["gpu"]
    if texts["sharding"] not in SHARDINGS:
        raise run.wrong("sharding is not known", texts["sharding"], f"one of {', '.join(SHARDINGS)}")
    if type(cells["activation_checkpointing"]) is not bool:
        raise run.wrong("activation_checkpointing is not known", texts["activation_checkpointing"], "true or false")
    return run


def _value(text: str) -> object:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for number in (int, float):
        try:
            value = number(text) if text.isascii() and "_" not in text else text
        except ValueError:
            continue
        if type(value) is not float or math.isfinite(value):
            return value
    return text
