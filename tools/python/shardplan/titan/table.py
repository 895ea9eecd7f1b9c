# SPDX-License-Identifier: Apache-2.0
"""The table of `shardplan torchtitan --vary`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardplan.command import printable_name
from shardplan.titan.variants import Made

_GIB = 1 << 30


@dataclass
class Row:
    """values: of the keys that vary. report: None: the command failed, and said why."""

    values: tuple[str, ...]
    made: Made
    report: dict | None = None
    tokens_per_second: int = 0  # of all ranks


def _figures(row: Row) -> dict[str, Any]:
    report, memory = row.report, row.report["memory"]
    return {
        "step_ms": report["step_ns"] / 1e6,
        "exposed_ms": report["exposed_communication_ns"] / 1e6,
        "tokens_per_second": row.tokens_per_second,
        "utilization_percent": report["model_flops_utilization_ppm"] / 1e4,
        "peak_gib": memory["peak_bytes"] / _GIB,
        "reserved_gib": memory["reserved_bytes"] / _GIB,
        "fits": memory["fits"],
    }


def document(keys: list[str], rows: list[Row]) -> list[dict[str, Any]]:
    return [
        dict(zip(keys, row.values)) | (_figures(row) if row.report else {"error": row.made.why}) for row in rows
    ]


def text(keys: list[str], rows: list[Row]) -> str:
    heads = [*(key.rpartition(".")[2] for key in keys), "step ms", "exposed ms", "tokens/s", "utilization", "peak GiB",
             "reserved GiB", "fits"]
    lines, failed = [heads], []
    for row in rows:
        if row.report is None:
            which = ", ".join(f"{key} {value}" for key, value in zip(keys, row.values))
            failed.append(f"{which}: {printable_name(row.made.why)}\n")
            lines.append([*row.values, *["-"] * (len(heads) - len(keys))])
            continue
        f = _figures(row)
        lines.append([
            *row.values, f"{f['step_ms']:,.2f}", f"{f['exposed_ms']:,.2f}", f"{f['tokens_per_second']:,}",
            f"{f['utilization_percent']:.1f} %", f"{f['peak_gib']:.2f}", f"{f['reserved_gib']:.2f}",
            "yes" if f["fits"] else "no",
        ])
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    made = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)).rstrip() + "\n" for line in lines]
    return "".join([made[0], "-" * (len(made[0]) - 1) + "\n", *made[1:], *failed])
