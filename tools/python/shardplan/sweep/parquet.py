# SPDX-License-Identifier: Apache-2.0
"""The rows of a sweep as a Parquet file, with types: what is a number is one, what is not known is null."""

from __future__ import annotations

import io
import os

from shardplan import files
from shardplan.sweep.rows import RESULTS

_INTEGERS = ("batch", "seq", "ranks", "cache_releases")
_TEXTS = ("error",)


class Missing(Exception):
    """pyarrow is not installed."""


def check() -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise Missing(f"--parquet needs the package pyarrow (pip install 'shardplan[parquet]'): {error}") from error


def write(path: str | os.PathLike, rows: list[dict[str, str]], axes: list[str]) -> None:
    """One column for each axis and result, in the order of the text file. CannotWrite leaves the old file."""
    import pyarrow
    import pyarrow.parquet

    columns = {}
    for name in [*axes, *RESULTS]:
        cells = [row[name] or None for row in rows]
        if name in _INTEGERS:
            columns[name] = pyarrow.array([None if cell is None else int(cell) for cell in cells], pyarrow.int64())
        elif name == "fits":
            columns[name] = pyarrow.array([None if cell is None else cell == "yes" for cell in cells], pyarrow.bool_())
        elif name in RESULTS and name not in _TEXTS:
            columns[name] = pyarrow.array([None if cell is None else float(cell) for cell in cells], pyarrow.float64())
        else:
            columns[name] = pyarrow.array(cells, pyarrow.string())
    whole = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), whole)
    files.write_bytes(path, whole.getvalue())
