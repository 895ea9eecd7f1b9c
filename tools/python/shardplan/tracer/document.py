# SPDX-License-Identifier: Apache-2.0
"""Writes a trace in the canonical layout of docs/reference/trace-format.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TextIO

SCHEMA = "shardplan.trace/1"
_HEAD = ("schema", "model", "source", "recorded_with", "compute_dtype", "tokens_per_batch", "world_size", "same_batch")
_LISTS = ("communicators", "modules", "parameters", "buffers", "inputs")
_PASSES = ("forwards", "backwards")
_CALLS = ("calls",)
_STEPS = ("optimizer_steps",)


# Nobody sees them: schemas/src/names/unicode.h.
_HIDDEN = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def _text(value) -> str:
    return _HIDDEN.sub(lambda found: f"\\u{ord(found.group()):04x}", json.dumps(value, ensure_ascii=False))


def _rows(indent: int, rows: list) -> Iterator[str]:
    for index, row in enumerate(rows):
        yield " " * indent + _text(row) + ("," if index + 1 < len(rows) else "") + "\n"


_PASS_FIELDS = ("name", "grad_enabled", "abandoned", "tensors", "forwards", "events")
_STEP_FIELDS = (
    "optimizer", "ranks", "replicas", "shape", "dtype", "nesterov", "ns_steps", "update", "orthogonalize", "apply"
)
_LONG = frozenset(("tensors", "events", "update", "orthogonalize", "apply"))  # an element a line


def _pass_fields(entry: dict) -> list[str]:
    fields = [f for f in _PASS_FIELDS if f in entry]
    return [f for f in fields if f in ("name", "events", "abandoned") or entry[f] not in ([], True)]


def _block_lines(entry: dict, fields: list[str], last: bool) -> Iterator[str]:
    yield "    {\n"
    for index, name in enumerate(fields):
        end = "," if index + 1 < len(fields) else ""
        if name in _LONG and entry[name]:
            yield f"      {_text(name)}: [\n"
            yield from _rows(8, entry[name])
            yield f"      ]{end}\n"
        else:
            yield f"      {_text(name)}: {_text(entry[name])}{end}\n"
    yield "    }" + ("" if last else ",") + "\n"


def lines(trace: dict) -> Iterator[str]:
    """The document's text in pieces. A field with its default is left out."""
    names = [f for f in (*_HEAD, *_LISTS, *_PASSES, *_CALLS, *_STEPS) if f in trace]
    required = ("schema", "model", "compute_dtype", "modules", "parameters", "forwards")
    names = [f for f in names if f in required or trace[f] not in ([], "", 0)]
    yield "{\n"
    for index, name in enumerate(names):
        end = "," if index + 1 < len(names) else ""
        value = trace[name]
        if name in _HEAD or not value:
            yield f"  {_text(name)}: {_text(value)}{end}\n"
            continue
        yield f"  {_text(name)}: [\n"
        if name in _LISTS + _CALLS:
            yield from _rows(4, value)
        else:
            for position, entry in enumerate(value):
                fields = [f for f in _STEP_FIELDS if f in entry] if name in _STEPS else _pass_fields(entry)
                yield from _block_lines(entry, fields, position + 1 == len(value))
        yield f"  ]{end}\n"
    yield "}\n"


def write(trace: dict, file: TextIO) -> None:
    file.writelines(lines(trace))
