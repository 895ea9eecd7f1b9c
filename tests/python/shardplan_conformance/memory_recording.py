# SPDX-License-Identifier: Apache-2.0
"""Recordings of memory as they are read: what is missing or of another kind than it has to be is an error that names
the file and the place."""

import json
from pathlib import Path

WHOLE, TEXT, SWITCH = "a whole number from 0", "a string", "true or false"
KNOBS = {
    "impl": TEXT,
    "attn": TEXT,
    "norm": TEXT,
    "loss": TEXT,
    "mp": TEXT,
    "units": TEXT,
    "ac": TEXT,
    "opt": TEXT,
    "seq": WHOLE,
    "batch": WHOLE,
    "world": WHOLE,
    "replicate": WHOLE,
    "accum": WHOLE,
    "prefetch": WHOLE,
    "tied": SWITCH,
    "del_logits": SWITCH,
    "accum_sync": SWITCH,
    "accum_reshard": SWITCH,
    "offload": SWITCH,
}
SIZES = ("dim", "layers", "heads", "kv_heads", "ffn", "vocab")
PEAK = {"total": WHOLE, "phase": TEXT, "unit": TEXT, "op": TEXT}
FIRST_COLUMNS = ("phase", "event", "unit", "total")
ALLOCATOR_KNOBS = {
    "policy": TEXT,
    "optimizer": TEXT,
    "sharding": TEXT,
    "backward_prefetch": TEXT,
    "forward_prefetch": SWITCH,
    "limit_all_gathers": SWITCH,
    "use_orig_params": SWITCH,
    "alloc_conf": TEXT,
    "device": TEXT,
    "gib": WHOLE,
}
ALLOCATOR_COLUMNS = {"step": WHOLE, "event": TEXT, "unit": TEXT}
ALLOCATOR_PEAK = dict.fromkeys(("allocated", "active", "reserved", "device_allocs", "retries"), WHOLE)


class BadRecording(Exception):
    """A recording that is missing, no JSON or damaged: the message names the file and the place."""


class _Damage(Exception):
    def __init__(self, pointer: str, found, expected: str) -> None:
        text = json.dumps(found)
        super().__init__(
            f"{pointer}: the recording is damaged (found {text if len(text) <= 60 else text[:57] + '...'}, expected "
            f"{expected})"
        )


def is_timeline_case(document) -> bool:
    return isinstance(document, dict) and {"knobs", "model", "timeline", "timeline_columns"} <= document.keys()


def is_allocator_case(document) -> bool:
    """Whether it is a case of memory_cuda.py."""
    return isinstance(document, dict) and {"knobs", "model", "columns", "rows", "peak"} <= document.keys()


def read_cases(folder: Path, names: list[str]) -> list[dict | BadRecording]:
    """The cases in order of their names: a recording, or what is wrong with it."""
    cases: list[dict | BadRecording] = []
    found = set()
    for path in sorted(folder.glob("*.json")):
        if names and path.stem not in names:
            continue
        found.add(path.stem)
        try:
            document = json.loads(path.read_text())
            if is_timeline_case(document) or is_allocator_case(document):
                _check(document)
                cases.append({**document, "case": path.stem})
            elif path.stem in names:
                cases.append(
                    BadRecording(
                        f"{path}: no recorded memory case (it has no knobs, model, timeline or timeline_columns, nor "
                        "rows and columns)"
                    )
                )
        except (ValueError, OSError, RecursionError, _Damage) as error:  # no JSON, no UTF-8, ...
            cases.append(BadRecording(f"{path}: {error}"))
    for name in names:
        if name not in found:
            cases.append(BadRecording(f"{folder}: has no recording {name}.json"))
    return cases


def _is(value, kind: str) -> bool:
    if kind == WHOLE:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 53
    return isinstance(value, str if kind == TEXT else bool)


def _object(holder: dict, key: str, pointer: str) -> dict:
    if not isinstance(holder.get(key), dict):
        raise _Damage(f"{pointer}/{key}", holder.get(key), "an object")
    return holder[key]


def _members(holder: dict, kinds: dict[str, str], pointer: str) -> None:
    for key, kind in kinds.items():
        if key not in holder:
            raise _Damage(pointer, sorted(holder), f'a member "{key}"')
        if not _is(holder[key], kind):
            raise _Damage(f"{pointer}/{key}", holder[key], kind)


def _tags(holder: dict, key: str, pointer: str) -> None:
    tags = _object(holder, key, pointer)
    _members(tags, dict.fromkeys(tags, WHOLE), f"{pointer}/{key}")


def _check(document: dict) -> None:
    """Everything that memory.py looks at is there and of its kind."""
    knobs = _object(document, "knobs", "")
    _members(knobs, KNOBS, "/knobs")
    reshard = knobs.get("reshard")
    if "reshard" not in knobs or not (reshard is None or isinstance(reshard, bool) or _is(reshard, WHOLE)):
        raise _Damage("/knobs/reshard", reshard, "null, true, false or a number of ranks")
    for key in ("seq", "batch", "world", "replicate", "accum"):
        if knobs[key] < 1:
            raise _Damage(f"/knobs/{key}", knobs[key], "1 or more")
    if knobs["world"] % knobs["replicate"] != 0:
        raise _Damage("/knobs/replicate", knobs["replicate"], f"a divisor of {knobs['world']}")
    _members(_object(document, "model", ""), dict.fromkeys(SIZES, WHOLE), "/model")
    if is_allocator_case(document):
        _check_allocator_case(document)
        return
    peak = _object(_object(document, "peak", ""), "step2", "/peak")
    _members(peak, PEAK, "/peak/step2")
    _tags(peak, "by_tag", "/peak/step2")
    if document.get("peak_engine_sums_in_place"):
        _check_sums_in_place(_object(document, "peak_engine_sums_in_place", ""))
    _check_timeline(document["timeline"], document["timeline_columns"])


def _check_allocator_case(document: dict) -> None:
    _members(document["knobs"], ALLOCATOR_KNOBS, "/knobs")
    columns, rows, peaks = document["columns"], document["rows"], document["peak"]
    named = isinstance(columns, list) and all(isinstance(column, str) for column in columns)
    if not named or not set(ALLOCATOR_COLUMNS) <= set(columns):
        raise _Damage("/columns", columns, f"names, with {', '.join(ALLOCATOR_COLUMNS)} among them")
    _check_rows(rows, "/rows", [ALLOCATOR_COLUMNS.get(column, WHOLE) for column in columns])
    for key, found in (("rows", rows), ("peak", peaks)):
        if not isinstance(found, list) or not found:
            raise _Damage(f"/{key}", found, "a list that is not empty")
    for index, peak in enumerate(peaks):
        if not isinstance(peak, dict):
            raise _Damage(f"/peak/{index}", peak, "an object")
        _members(peak, ALLOCATOR_PEAK, f"/peak/{index}")


def _check_sums_in_place(peak: dict) -> None:
    pointer = "/peak_engine_sums_in_place"
    _members(peak, {"step2": WHOLE}, pointer)
    place = peak.get("step2_at")
    if not isinstance(place, list) or len(place) != 4 or not all(isinstance(place[i], str) for i in (0, 1, 3)):
        raise _Damage(f"{pointer}/step2_at", place, "phase, unit, module and operator")
    _tags(peak, "step2_by_tag", pointer)


def _check_timeline(rows, columns) -> None:
    if (
        not isinstance(columns, list)
        or tuple(columns[: len(FIRST_COLUMNS)]) != FIRST_COLUMNS
        or not all(isinstance(c, str) for c in columns)
    ):
        raise _Damage("/timeline_columns", columns, f"names that begin with {', '.join(FIRST_COLUMNS)}")
    _check_rows(rows, "/timeline", [TEXT if column < 3 else WHOLE for column in range(len(columns))])


def _check_rows(rows, pointer: str, kinds: list[str]) -> None:
    if not isinstance(rows, list):
        raise _Damage(pointer, rows, "a list of rows")
    for index, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(kinds):
            raise _Damage(f"{pointer}/{index}", row, f"a list of {len(kinds)} values")
        for column, (value, kind) in enumerate(zip(row, kinds)):
            if not _is(value, kind):
                raise _Damage(f"{pointer}/{index}/{column}", value, kind)
