# SPDX-License-Identifier: Apache-2.0
"""Recordings of real PyTorch on its real CUDA caching allocator: the allocator's own statistics at every hook.

A case has `knobs` and `model` as the other recordings of memory, and `rows` with `columns`. A row has, at a hook of a
step, the bytes that are requested, allocated (blocks handed out), active (and those whose free waits for another
stream), reserved, and the number of segments. `rounded` is what is not freed yet, each request rounded up to 512.
`peak` has, by step, peaks of these and how often the driver was called.

The device that it was recorded on is `fast` (what is enqueued is done at once) or `slow` (nothing is done before the
host waits for it).
"""

from __future__ import annotations

_SMALL_SEGMENT_BYTES = 2 << 20
_OF_ROW = {
    "rounded": lambda row: row["total_bytes"],
    "requested": lambda row: row["allocator"]["requested_bytes"],
    "allocated": lambda row: row["allocator"]["allocated_bytes"],
    "active": lambda row: row["allocator"]["active_bytes"],
    "reserved": lambda row: row["allocator"]["reserved_bytes"],
    "segments": lambda row: row["allocator"]["segments"],
}
_OF_END = {
    "allocated": "peak_allocated_bytes",
    "active": "peak_active_bytes",
    "reserved": "peak_reserved_bytes",
    "device_allocs": "device_allocs",
    "retries": "retries",
}


def options(case: dict) -> list[str]:
    """Options of `shardplan memory`. The memory of a device in software is mapped downwards."""
    knobs = case["knobs"]
    addresses = "down" if str(case.get("device", "")).startswith("software") else "up"
    frees = "late" if knobs["device"] == "slow" else "at-once"
    settings = ["--alloc-conf", knobs["alloc_conf"]] if knobs["alloc_conf"] else []
    steps = ["--steps", str(knobs["steps"])] if "steps" in knobs else []
    return [
        "--reserved", "--frees", frees, "--addresses", addresses, "--allocator-limit", f"{knobs['gib']}GiB", *steps,
        *settings,
    ]


def first_difference(case: dict, computed: dict) -> str | None:
    """The first row of the last step, or the end, at which `computed` (what `--rows` wrote) differs from the
    recording."""
    columns = {name: index for index, name in enumerate(case["columns"])}
    last = max(row[columns["step"]] for row in case["rows"])
    wanted = [row for row in case["rows"] if row[columns["step"]] == last]
    if computed["allocator"]["out_of_memory"] != bool(case.get("out_of_memory")):
        return f"out of memory: {computed['allocator']['out_of_memory']} instead of {bool(case.get('out_of_memory'))}"
    if computed["allocator"]["out_of_memory"]:
        return None
    for index, row in enumerate(wanted):
        event, unit = row[columns["event"]], row[columns["unit"]]
        where = f"row {index} ({event}{' ' if unit else ''}{unit})"
        if index >= len(computed["rows"]):
            return f"{where}: there is no such row"
        found = computed["rows"][index]
        if (found["event"], found["unit"]) != (event, unit):
            return f"{where}: found {found['event']} {found['unit']}"
        values = {name: (of(found), row[columns[name]]) for name, of in _OF_ROW.items() if name in columns}
        if differs := _differences(values):
            return f"{where}: {differs}"
    if len(computed["rows"]) > len(wanted):
        return f"row {len(wanted)}: {computed['rows'][len(wanted)]['event']} is not in the recording"
    return _difference_at_end(case, computed)


def _difference_at_end(case: dict, computed: dict) -> str | None:
    values = {}
    for name, ours in _OF_END.items():
        steps = [step[name] for step in case["peak"]]
        values[name] = (computed["allocator"][ours], max(steps))
    ours, theirs = values["device_allocs"]
    if 0 < ours - theirs <= _spared(case):
        values["device_allocs"] = (theirs, theirs)
    differs = _differences(values)
    return f"over all steps: {differs}" if differs else None


def _spared(case: dict) -> int:
    """How many calls of the driver what FSDP1's construction left in the allocator may spare: segments of the small
    pool that are free in part before the first step. None where the shards were moved to memory of their own
    (`compact`)."""
    if case["knobs"].get("compact", True):
        return 0
    columns = {name: index for index, name in enumerate(case["columns"])}
    before = next(row for row in case["rows"] if row[columns["event"]] == "init")
    return (before[columns["reserved"]] - before[columns["allocated"]]) // _SMALL_SEGMENT_BYTES


def _differences(values: dict[str, tuple[int, int]]) -> str:
    return ", ".join(
        f"{name} {ours} instead of {theirs} ({ours - theirs:+d})"
        for name, (ours, theirs) in values.items()
        if ours != theirs
    )
