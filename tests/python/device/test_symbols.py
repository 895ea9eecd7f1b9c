"""What torch's libraries ask of the CUDA runtime and of NCCL, by name: all that the device gives, and what is known to be left."""

import pathlib
import re
import subprocess

import pytest
import torch
from conftest import build_folder

LIBRARIES = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so", "libtorch_cpu.so")
# Calls of these end in an error of the real libraries, which find no GPU.
LEFT = re.compile(
    "|".join(
        (
            "cudaGraph|cudaUserObject|cudaDevice[GS]etGraphMem|cudaStream(BeginCaptureToGraph|UpdateCapture|EndCapture)",
            "cudaMemPool|cudaMallocAsync|cudaFreeAsync|cudaDeviceGetDefaultMemPool",  # memory pools of the driver
            "cudaIpc",  # memory shared between processes
            "cudaLibrary|cudaKernelSetAttribute",  # kernels that are loaded from a file
            "cudaMallocManaged",
            "ncclDevComm|ncclGet(LsaMultimem|Peer)DevicePointer|ncclWinGetUserPtr",  # NCCL's device side
            "ncclPutSignal|ncclSignal|ncclWaitSignal|ncclCommMemStats",
        )
    )
)


def symbols(library: pathlib.Path, which: str) -> set[str]:
    listed = subprocess.run(["nm", "-D", which, str(library)], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1].split("@")[0] for line in listed.splitlines() if line.strip()}
    return {name for name in names if re.match(r"(__)?cuda[A-Z]|nccl[A-Z]", name)}


def test_the_device_gives_what_torch_asks_for():
    device = build_folder() / "tests" / "device" / "libshardplan_device.so"
    if not device.exists():
        pytest.skip(f"{device} is not built")
    folder = pathlib.Path(torch.__file__).parent / "lib"
    asked = set().union(*(symbols(folder / name, "--undefined-only") for name in LIBRARIES))
    assert len(asked) > 100
    given = symbols(device, "--defined-only")
    assert sorted(name for name in asked - given if not LEFT.match(name)) == []
