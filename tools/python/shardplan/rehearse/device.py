# SPDX-License-Identifier: Apache-2.0
"""The device that a script is rehearsed on: its library, its memory, and what of it the allocator does not get."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

from shardplan.command import built_command

DEFAULT_CLUSTER = "h100_sxm"
_LIBRARY = "libshardplan_device.so"
# As NcclBufferBytes of the simulator has it: 16 channels with the receive buffers of the three protocols (simple, LL128, LL).
NCCL_BYTES = 16 * ((4 << 20) + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16)


class NoDevice(Exception):
    """The device in software is not there."""


class BadCluster(Exception):
    """There is no such cluster, or it is no cluster document."""


@dataclasses.dataclass(frozen=True)
class Device:
    cluster: str
    name: str  # "H100 SXM 80GB"
    memory_bytes: int
    context_bytes: int


def device_folder() -> Path:
    """Where libshardplan_device.so is, with libcuda.so.1 and libnvidia-ml.so.1 beside it: $SHARDPLAN_DEVICE_LIBRARY_FOLDER, else the build of the command."""
    named = os.environ.get("SHARDPLAN_DEVICE_LIBRARY_FOLDER")
    programs = os.environ.get("SHARDPLAN_PROGRAMS")
    candidates = [Path(named)] if named else [Path(programs).parent / "device"] if programs else []
    for folder in candidates:
        if (folder / _LIBRARY).is_file():
            return folder.resolve()
    looked = ", ".join(map(str, candidates)) or "nowhere: neither SHARDPLAN_PROGRAMS nor SHARDPLAN_DEVICE_LIBRARY_FOLDER is set"
    raise NoDevice(f"the device in software is not built (looked for {_LIBRARY} in {looked}): tools/build dev builds it, for the torch at hand")


def device_of(cluster: str, gpus: int | None, memory_bytes: int | None) -> Device:
    """cluster: a file, a shipped document or a device, as --cluster of the other commands. memory_bytes: in place of the cluster's. Raises BadCluster, NoCommand."""
    path = _answer({"cluster": cluster, "ranks": gpus or 0}, "path")
    document = json.loads(_answer({"document": path}, "text"))
    device = document["device"]
    return Device(document["name"], device["name"], memory_bytes or device["memory_bytes"], device.get("context_bytes", 0))


def _answer(question: dict, field: str) -> str:
    """Of `shardplan evaluate`, which knows the shipped clusters, and reads a document as every command does."""
    asked = subprocess.run([built_command("rehearse"), "evaluate"], input=json.dumps(question) + "\n", capture_output=True, text=True, check=False)
    answer = json.loads(asked.stdout.splitlines()[0]) if asked.stdout else {"error": asked.stderr.strip()}
    if field not in answer:
        raise BadCluster(str(answer.get("error", "no answer")).replace("cluster: shardplan: error: ", ""))
    return answer[field]
