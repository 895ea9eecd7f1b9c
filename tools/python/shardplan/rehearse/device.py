# SPDX-License-Identifier: Apache-2.0
"""The device that a script is rehearsed on: its library, its memory, and what of it the allocator does not get."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from shardplan import building
from shardplan.clusters import BadCluster, document_of

DEFAULT_CLUSTER = "h100_sxm"
_LIBRARY = "libshardplan_device.so"
_OPENED_AS = ("libcuda.so.1", "libnvidia-ml.so.1")


# Compute capability by a part of the device's name (NVIDIA's data sheets). PyTorch chooses kernels by it. The first
# that fits.
_CAPABILITIES = {
    "V100": "7.0", "A100": "8.0", "A800": "8.0", "A10": "8.6", "A40": "8.6", "A6000": "8.6", "L40": "8.9", "L4": "8.9",
    "H20 ": "9.0", "H100": "9.0", "H800": "9.0", "H200": "9.0", "B200": "10.0", "B300": "10.3",
}  # fmt: skip
# An H100's.
_OTHER_CAPABILITY, _OTHER_MULTIPROCESSORS = "9.0", 132


class NoDevice(Exception):
    """The device in software is not there."""


@dataclasses.dataclass(frozen=True)
class Device:
    cluster: str
    name: str  # "H100 SXM 80GB"
    memory_bytes: int
    context_bytes: int
    nccl_bytes: int  # of a communicator of more than one rank
    capability: str  # "9.0"
    multiprocessors: int
    document: str  # the cluster's

    @property
    def cuda_name(self) -> str:
        """The name that torch.cuda.get_device_name gives."""
        return self.name if self.name.startswith("NVIDIA") else f"NVIDIA {self.name}"


def device_folder() -> Path:
    """The folder of libshardplan_device.so: $SHARDPLAN_DEVICE_LIBRARY_FOLDER, else the build of the command, else that
    of shardplan-torch beside this package. Without any the library is compiled for the torch of this interpreter, once.
    Raises NoDevice."""
    if named := os.environ.get("SHARDPLAN_DEVICE_LIBRARY_FOLDER"):
        candidates = [Path(named)]
    else:
        programs = os.environ.get("SHARDPLAN_PROGRAMS")
        candidates = [
            Path(__file__).resolve().parents[2] / "_shardplan_device",
            *([Path(programs).parent / "device"] if programs else []),
        ]
    for folder in candidates:
        if (folder / _LIBRARY).is_file():
            return folder.resolve()
    if not named and building.comes_with_sources():
        try:
            return building.built_device()
        except building.NotBuilt as error:
            raise NoDevice(str(error)) from error
    looked = " and ".join(map(str, candidates))
    raise NoDevice(
        f"the device in software is not built (looked for {_LIBRARY} in {looked}): tools/build dev builds it, for the "
        "torch at hand (one with CUDA; no GPU is needed)"
    )


def with_links(folder: Path, scratch: Path) -> Path:
    """The folder, or one of links to its files, that also has the names by which torch opens the library."""
    if all((folder / name).exists() for name in _OPENED_AS):
        return folder
    linked = scratch / "device"
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    for name in _OPENED_AS:
        (linked / name).symlink_to(_LIBRARY)
    return linked


def environment_on(device: Device, devices: int, mode: str, library_folder: Path) -> dict[str, str]:
    """Variables of a process that runs on the device in software, so many of them (docs/internals/device.md). mode:
    "null", "serial"."""
    return {
        "LD_PRELOAD": first(library_folder / _LIBRARY, os.environ.get("LD_PRELOAD")),
        "LD_LIBRARY_PATH": first(library_folder, os.environ.get("LD_LIBRARY_PATH")),
        "SHARDPLAN_DEVICE_MODE": mode,
        "SHARDPLAN_DEVICE_BYTES": str(device.memory_bytes),
        "SHARDPLAN_DEVICE_COUNT": str(devices),
        "SHARDPLAN_DEVICE_NAME": device.cuda_name,
        "SHARDPLAN_DEVICE_CAPABILITY": device.capability,
        "SHARDPLAN_DEVICE_MULTIPROCESSORS": str(device.multiprocessors),
    }


def first(path: Path, rest: str | None) -> str:
    """A list of paths, as of PATH, that begins with this one."""
    return ":".join(filter(None, [str(path), rest]))


def device_of(cluster: str, gpus: int | None, memory_bytes: int | None) -> Device:
    """cluster: a file, a shipped document or a device, as --cluster of the other commands. memory_bytes: in place of
    the cluster's. Raises BadCluster, NoCommand."""
    _, answer = document_of(cluster, gpus, "rehearse")
    document = json.loads(answer["text"])
    device = document["device"]
    if memory_bytes is not None and memory_bytes <= device.get("context_bytes", 0):
        raise BadCluster(
            f"--device-memory: a CUDA context alone takes {device['context_bytes']} bytes (found {memory_bytes}, "
            "expected more; 80GB is a size)"
        )
    capability = next(
        (capability for part, capability in _CAPABILITIES.items() if part in f"{device['name']} "), _OTHER_CAPABILITY
    )
    return Device(
        document["name"],
        device["name"],
        memory_bytes or device["memory_bytes"],
        device.get("context_bytes", 0),
        answer["nccl_buffer_bytes"],
        capability,
        device.get("multiprocessors", _OTHER_MULTIPROCESSORS),
        answer["text"],
    )
