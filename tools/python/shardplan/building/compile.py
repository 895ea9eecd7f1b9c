# SPDX-License-Identifier: Apache-2.0
"""CMake and Ninja over the sources of the wheel, and what they say meanwhile."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from . import machine
from .errors import NotBuilt

_TELL_EVERY_S = 15
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STEPS = re.compile(rb"\[(\d+)/(\d+)\](?!.*\[\d+/\d+\])")
_FAULT = re.compile(r"error:|error \w+:|undefined reference|cannot find|Killed|No space left")


@dataclasses.dataclass(frozen=True)
class Part:
    """Something that is compiled by itself."""

    title: str
    targets: tuple[str, ...]  # of Ninja; empty: all
    files: tuple[str, ...]  # patterns in the build folder: what is left of it


ADAPTER = Part("the adapter", (), ("python/_shardplan*.so", "bin/shardplan-run"))
DEVICE = Part(
    "the device in software",
    ("shardplan_device", "shardplan_device_kernels"),
    ("device/libshardplan_device*.so", "device/torch_version"),
)


def compile_into(folder: Path, part: Part, facts: machine.Facts, compiler: machine.Compiler) -> None:
    """Leaves the part's files in the folder. NotBuilt: with the compiler's first complaint, and where its whole log
    is."""
    machine.check_python_headers()
    cmake, ninja = machine.program("cmake"), machine.program("ninja")
    work, log = folder / "work", folder.parent / f"{folder.name.split('.')[0]}.log"
    configure = [
        cmake, "-S", machine.SOURCES, "-B", work, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}",
        f"-DCMAKE_CXX_COMPILER={compiler.path}", "-DCMAKE_BUILD_TYPE=Release",
        f"-DCMAKE_CXX_FLAGS_RELEASE={machine.FLAGS}", f"-DSHARDPLAN_TORCH_DIR={facts.torch_folder}",
        f"-DPython3_EXECUTABLE={sys.executable}", f"-DPython3_INCLUDE_DIR={sysconfig.get_path('include')}",
    ]
    begin = time.monotonic()
    _say(
        f"compiling {part.title} for torch {facts.torch}, {facts.python}, with {compiler.title}: once, a minute or "
        "two on two processors"
    )
    _run([str(word) for word in configure], part, log, begin)
    _run([ninja, "-C", str(work), "-j", str(machine.jobs()), *part.targets], part, log, begin)
    for made in [path for pattern in part.files for path in work.glob(pattern)]:
        made.rename(folder / made.name)
    shutil.rmtree(work)
    _say(f"compiled in {time.monotonic() - begin:.0f} s, kept in {folder.parent}")


def _say(text: str) -> None:
    print(f"shardplan: {text}", file=sys.stderr, flush=True)


def _run(command: list[str], part: Part, log: Path, begin: float) -> None:
    told, libc = time.monotonic(), ctypes.CDLL(None)

    def ends_with_this_process() -> None:
        """A rank that is killed leaves no compiler behind: ninja and cmake end theirs at SIGTERM."""
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    with open(log, "w+b") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=_environment(),
            preexec_fn=ends_with_this_process,
        )
        try:
            while child.poll() is None:
                time.sleep(0.1)
                if time.monotonic() - told > _TELL_EVERY_S:
                    told = time.monotonic()
                    _say(f"{told - begin:.0f} s{_progress(log)}")
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    if child.returncode != 0:
        raise NotBuilt(f"{part.title} does not compile: {_complaint(log)} (the whole log: {log})")


def _environment() -> dict[str, str]:
    """Flags of the user's would change what is kept under the same key."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CMAKE_GENERATOR", "NINJA_STATUS")
    }


def _progress(log: Path) -> str:
    steps = _STEPS.search(log.read_bytes().replace(b"\n", b" "))
    return f": {steps[1].decode()} of {steps[2].decode()} steps" if steps else ""


def _complaint(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if "CMake Error" in "\n".join(lines):  # its text follows the line that begins with the word
        first = next(number for number, line in enumerate(lines) if line.startswith("CMake Error"))
        text = [line for line in lines[first + 1 : first + 6] if not line.startswith("Call Stack")]
        return " ".join(text)[:400] or lines[first]
    faults = [line for line in lines if _FAULT.search(line)]
    return (faults[:1] or lines[-1:] or ["nothing said"])[0][:300]
