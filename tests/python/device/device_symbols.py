# SPDX-License-Identifier: Apache-2.0
"""Names that torch's libraries ask of the CUDA runtime and of NCCL. Needs no torch: dev/check_torch asks it of
releases that are not installed."""

import pathlib
import re
import subprocess

LIBRARIES = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so", "libtorch_cpu.so")
# Calls of these end in an error of the real libraries, which find no GPU.
LEFT = re.compile(
    "|".join(
        (
            "cudaGraph|cudaUserObject|cudaDevice[GS]etGraphMem|"
            "cudaStream(BeginCaptureToGraph|UpdateCapture|EndCapture)",
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


def asked_of_device(torch_libraries: pathlib.Path) -> set[str]:
    return set().union(*(symbols(torch_libraries / name, "--undefined-only") for name in LIBRARIES))


def not_given(device: pathlib.Path, torch_libraries: pathlib.Path) -> list[str]:
    """Names that torch asks for, the device does not give, and nobody knows of."""
    missing = asked_of_device(torch_libraries) - symbols(device, "--defined-only")
    return sorted(name for name in missing if not LEFT.match(name))
