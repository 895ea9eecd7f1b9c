# SPDX-License-Identifier: Apache-2.0
"""Cluster documents: read, and told where fitted figures are from."""

from __future__ import annotations

import json

from shardplan import files
from shardplan.runs.figures import FIGURES, MILLION
from shardplan.runs.fit import Fit
from shardplan.runs.table import BadTable

_SCHEMA = "shardplan.cluster/1"


def read(path: str) -> dict:
    try:
        document = json.loads(files.read_bytes(path))
    except (OSError, ValueError, RecursionError) as error:
        raise BadTable(f"{path}: cannot be read as a cluster: {error}") from error
    found = document.get("schema") if isinstance(document, dict) else type(document).__name__
    if found != _SCHEMA or not isinstance(document.get("device"), dict):
        raise BadTable(f"{path}: no cluster (found {found!r} at /schema, expected {_SCHEMA!r} and a device)")
    return document


def say_sources(fitted: Fit, note: str) -> None:
    """The figures that the rows tell are fitted ones."""
    document = fitted.document
    sources = {source["figure"]: source for source in document.get("sources", [])}
    for figure in fitted.figures:
        name = FIGURES[figure.name].source
        if figure.told and name:
            sources[name] = {
                "figure": name, "origin": "fitted",
                "off_ppm": max(1, round(MILLION * (figure.high / figure.factor - 1))), "note": note,
            }
    document["sources"] = list(sources.values())
