# SPDX-License-Identifier: Apache-2.0
"""A rehearsal as text: steps and phases, the peak, the device."""

from __future__ import annotations

import collections
import itertools
import re

from shardplan.command import printable_name

from .device import Device

_PHASES = ("setup", "forward", "backward", "optimizer")
_SHOWN_MODULES = 8
_HUB_ERRORS = {
    "LocalEntryNotFoundError", "OfflineModeIsEnabled", "HfHubHTTPError", "ConnectionError", "RepositoryNotFoundError",
    "GatedRepoError", "URLError", "gaierror",
}


def size_text(size_bytes: int) -> str:
    if size_bytes == 0 or size_bytes >= 1 << 27:
        return f"{size_bytes / (1 << 30):.2f} GiB"
    return f"{size_bytes / (1 << 20):.2f} MiB" if size_bytes >= 1 << 20 else f"{size_bytes / (1 << 10):.2f} KiB"


def rows_of(result: dict) -> list[dict]:
    """One for each step and phase, of all its stretches."""
    rows: dict[tuple[int, str], dict] = {}
    for stretch in result["stretches"]:
        row = rows.setdefault(
            (stretch["step"], stretch["phase"]),
            {
                "step": stretch["step"], "phase": stretch["phase"], "allocated_bytes": 0, "reserved_bytes": 0,
                "retries": 0, "out_of_memory": 0,
            },
        )
        for most in ("allocated_bytes", "reserved_bytes"):
            row[most] = max(row[most], stretch[most])
        for sum_ in ("retries", "out_of_memory"):
            row[sum_] += stretch[sum_]
    return sorted(rows.values(), key=lambda row: (row["step"], _PHASES.index(row["phase"])))


def outside_of(result: dict, device: Device) -> list[tuple[str, int]]:
    """Device memory beside the allocator's."""
    count = result["communicators"]
    of_nccl = (
        [(f"NCCL, {count} communicator{'s' if count > 1 else ''} (an estimate)", count * device.nccl_bytes)]
        if count
        else []
    )
    return [("CUDA context", device.context_bytes), *of_nccl]


def budget_of(result: dict, device: Device) -> int:
    return device.memory_bytes - sum(size for _, size in outside_of(result, device))


def fits(result: dict) -> bool:
    return not (result["error"] or {}).get("out_of_memory", False)


def peak_place(result: dict) -> str:
    peak = result.get("peak")
    if peak is None:
        row = max(rows_of(result), key=lambda row: row["allocated_bytes"])
        return _place(row["step"], row["phase"], "")
    return _place(peak["step"], peak["phase"], peak["module"])


def _place(step: int, phase: str, module: str) -> str:
    return (phase if step == 0 else f"{phase} of step {step}") + (f", {module}" if module else "")


def _table(rows: list[tuple[str, ...]], left: int) -> list[str]:
    """left: so many columns are aligned to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def text_of(result: dict, device: Device) -> str:
    parts = [_head(result, device), "", *_table(table_of(result), 2), "", *_peak(result), *_device(result, device)]
    if not fits(result):
        parts += ["", *_out_of_memory(result, device)]
    return "\n".join(parts)


def _head(result: dict, device: Device) -> str:
    steps = result["steps"]
    return (
        f"\nrehearsed: rank {result['rank']} of {result['world_size']} on {printable_name(device.name)}, {steps} "
        f"step{'' if steps == 1 else 's'}, torch {result['torch']}, {result['seconds']:.1f} s"
    )


def table_of(result: dict) -> list[tuple[str, ...]]:
    """Cells of each row, the head first. Steps in a row that take the same are one: "2-5"."""
    by_step: list[tuple[int, int, list[tuple[str, ...]]]] = []  # first, last, cells of the phases
    for step, rows in itertools.groupby(rows_of(result), key=lambda row: row["step"]):
        cells = [
            (
                row["phase"], size_text(row["allocated_bytes"]), size_text(row["reserved_bytes"]), str(row["retries"]),
                str(row["out_of_memory"]),
            )
            for row in rows
        ]
        if by_step and by_step[-1][2] == cells:
            by_step[-1] = by_step[-1][0], step, cells
        else:
            by_step.append((step, step, cells))
    named = [
        ("" if first == 0 else f"{first}" if first == last else f"{first}-{last}", phases)
        for first, last, phases in by_step
    ]
    head = ("step", "phase", "max allocated", "max reserved", "retries", "out of memory")
    return [head, *((name, *cells) for name, phases in named for cells in phases)]


def stage_row(result: dict) -> tuple[str, ...]:
    return (
        str(result["rank"]), size_text(result["allocated_bytes"]), size_text(result["reserved_bytes"]),
        "yes" if fits(result) else "no",
    )


def stages_text(rows: list[tuple[str, ...]]) -> str:
    return "\n".join(_table([("rank", "max allocated", "max reserved", "fits"), *rows], 1))


def _peak(result: dict) -> list[str]:
    lines = [
        f"peak: {result['allocated_bytes']} bytes, {size_text(result['allocated_bytes'])} allocated, in "
        f"{printable_name(peak_place(result))}"
    ]
    if (peak := result.get("peak")) is None:
        return [*lines, ""]
    lines += ["  " + line for line in _table([(name, size_text(size)) for name, size in peak["categories"].items()], 1)]
    modules = list(grouped(peak["modules"]).items())
    shown = [(printable_name(name) or "(in no module)", size_text(size)) for name, size in modules[:_SHOWN_MODULES]]
    if rest := modules[_SHOWN_MODULES:]:
        shown.append((f"{len(rest)} others", size_text(sum(size for _, size in rest))))
    return [*lines, "by module:", *("  " + line for line in _table(shown, 1)), ""]


def grouped(modules: dict[str, int]) -> dict[str, int]:
    """Repeated blocks as one: "model.layers.*.mlp". The largest first."""
    sums: collections.Counter = collections.Counter()
    for name, size in modules.items():
        sums[re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name)] += size
    return dict(sums.most_common())


def _device(result: dict, device: Device) -> list[str]:
    rows = [
        ("device memory", size_text(device.memory_bytes)),
        *((name, size_text(size)) for name, size in outside_of(result, device)),
        ("left for the allocator", size_text(budget_of(result, device))),
    ]
    rows.append(("max reserved", size_text(result["reserved_bytes"])))
    rows.append(("fits", _fits(result)))
    return _table(rows, 1)


def _fits(result: dict) -> str:
    if not fits(result):
        return "no: out of memory"
    return "yes" if result["steps"] and result["error"] is None else "so far"


def _out_of_memory(result: dict, device: Device) -> list[str]:
    error = result["error"]
    where = f"{error['file']}:{error['line']}" + (f", module {error['module']}" if error["module"] else "")
    return [
        f"out of memory in {error['place']}: {printable_name(where)}",
        f"  {printable_name(error['code'])}",
        *(f"  {printable_name(line)}" for line in error["message"].splitlines()[:1]),
    ]


def error_line(error: dict) -> str:
    message = printable_name(error["message"].splitlines()[0] if error["message"] else "")
    line = (
        f"error: the script raised {error['type']} in {error['place']}, "
        f"{printable_name(error['file'])}:{error['line']}: {message}"
    )
    if _HUB_ERRORS & set(error["kinds"]):
        line += (
            " (it needs a hub: download the model and data first, and name their folders; or let it, with a network)"
        )
    return line
