"""Cluster documents that are read, said where their figures are from, and written."""

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
        if figure.told:
            name = FIGURES[figure.name].source
            sources[name] = {"figure": name, "origin": "fitted", "off_ppm": max(1, round(MILLION * (figure.high / figure.factor - 1))), "note": note}
    document["sources"] = list(sources.values())


def text(document: dict) -> str:
    """As the commands write documents: an object that holds no other is one line."""
    return _text(document, "") + "\n"


def _text(value: object, indent: str) -> str:
    if not isinstance(value, (dict, list)) or not value:
        return json.dumps(value, ensure_ascii=False)
    inner = indent + "  "
    if isinstance(value, list):
        if not any(isinstance(item, (dict, list)) for item in value):
            return json.dumps(value, ensure_ascii=False)
        items = [inner + (_text(item, inner) if _nested(item) else json.dumps(item, ensure_ascii=False)) for item in value]
        return "[\n" + ",\n".join(items) + f"\n{indent}]"
    items = [f"{inner}{json.dumps(key)}: {_text(item, inner)}" for key, item in value.items()]
    return "{\n" + ",\n".join(items) + f"\n{indent}}}"


def _nested(value: object) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(isinstance(part, (dict, list)) for part in parts)
