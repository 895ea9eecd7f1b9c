# SPDX-License-Identifier: Apache-2.0
"""A rehearsal as a report document (docs/reference/report-format.md)."""

from __future__ import annotations

import os

from . import text
from .device import Device

# The fields are there in every report. Without a cluster they are 0.
_TIMES = (
    "step_ns", "forward_ns", "backward_ns", "optimizer_ns", "compute_ns", "communication_ns",
    "exposed_communication_ns", "overlap_ppm", "host_ns", "tokens_per_second_per_rank", "model_flops_utilization_ppm",
)


def report_of(result: dict, device: Device, command: list[str], timed: dict | None) -> dict:
    """timed: the report of the recorded step's time; None: it has none."""
    peak = result.get("peak")
    categories = dict(peak["categories"]) if peak else {"allocated": result["allocated_bytes"]}
    if result["communicators"]:
        categories["nccl_buffers"] = result["communicators"] * device.nccl_bytes
    rows = text.rows_of(result)
    return {
        "schema": "shardplan.report/1",
        "model": " ".join(os.path.basename(word) for word in command),
        "policy": "rehearsed",
        "cluster": device.cluster,
        "world_size": result["world_size"],
        **({name: timed[name] for name in _TIMES} if timed else dict.fromkeys(_TIMES, 0)),
        "streams": timed["streams"] if timed else [],
        "collectives": timed["collectives"] if timed else [],
        "units": [],
        "memory": {
            "peak_bytes": result["allocated_bytes"],
            "peak_at": text.peak_place(result),
            "peak_by_category": [
                {"category": name, "size_bytes": size} for name, size in sorted(categories.items()) if size > 0
            ],
            "steady_bytes": result["steady_bytes"],
            "context_bytes": device.context_bytes,
            "device_memory_bytes": device.memory_bytes,
            "reserved_bytes": result["reserved_bytes"],
            "cache_releases": sum(row["retries"] for row in rows),
            "fits": text.fits(result),
        },
        "measured": {
            "device": f"{device.name}, in software", "rank": result["rank"], "ranks": 1, "steps_ns": [],
            "waiting_ns": 0, "unassigned_kernels": 0, "unassigned_ns": 0, "collectives_beside_plan": 0,
            "collectives_missing": 0,
        },
        "notes": [
            "rehearsed: the script ran on a device in software on which nothing is computed",
            *(timed["notes"] if timed else ["without a cluster times have no meaning and are 0"]),
            "the other ranks are played: each gives what this rank gives",
            "nccl_buffers is an estimate: 16 channels of the default buffers for each communicator",
        ],
        "extensions": {
            "rehearse": {
                "command": command,
                "torch": result["torch"],
                "steps": result["steps"],
                "phases": rows,
                "modules": [{"module": name, "size_bytes": size} for name, size in peak["modules"].items()]
                if peak
                else [],
                "error": result["error"],
            }
        },
    }
