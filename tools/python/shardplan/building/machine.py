# SPDX-License-Identifier: Apache-2.0
"""The tools that compile the adapter: torch, Python, a compiler, CMake and Ninja. Each function raises NotBuilt where
something is missing, and says what to install."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from shardplan.installing import has_torch, how_to_install, why_no_torch

from .errors import NotBuilt

SOURCES = Path(__file__).parent / "sources"
LEAST_GXX = 12  # std::expected
_NEWEST_GXX = 20  # of the names g++-NN that are looked for
_BYTES_PER_COMPILER = 2_200_000_000  # 2.08e9 measured of the largest file, g++ 12 -O2
FLAGS = "-O2 -DNDEBUG"


@dataclasses.dataclass(frozen=True)
class Compiler:
    path: str
    version: str  # the first line of --version

    @property
    def key(self) -> str:
        return f"{os.path.realpath(self.path)} {self.version}"

    @property
    def title(self) -> str:
        return f"{Path(self.path).name} {self.version.split()[-1]}"


@dataclasses.dataclass(frozen=True)
class Facts:
    """All that the compiled files depend on, beside the compiler."""

    sources: str  # their digest
    torch: str
    torch_commit: str
    torch_folder: str  # shardplan-run finds libtorch there
    cuda: str
    python: str  # "cpython-311-x86_64-linux-gnu"
    flags: str


def facts(imports_torch: bool = True) -> Facts:
    """imports_torch=False: what torch's version file says is believed, which takes no seconds."""
    if (
        problem := why_no_torch()
        if imports_torch
        else ""
        if has_torch()
        else f"torch is not installed: {how_to_install('torch')}"
    ):
        raise NotBuilt(problem)
    folder = Path(importlib.util.find_spec("torch").origin).resolve().parent
    version = runpy.run_path(str(folder / "version.py"))
    machines = sorted(path.name for path in (SOURCES / "lib").iterdir())
    if sys.platform != "linux" or platform.machine() not in machines:
        raise NotBuilt(
            f"this shardplan is for {' and '.join(machines)} (found {platform.machine()}, {sys.platform}): pip "
            "install --force-reinstall shardplan"
        )
    return Facts(
        digest(SOURCES), str(version["__version__"]), str(version["git_version"]), str(folder), str(version["cuda"]),
        sysconfig.get_config_var("SOABI"), FLAGS,
    )


def digest(folder: Path) -> str:
    """A digest of the names and the bytes of the files in the folder."""
    whole = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        whole.update(f"{path.relative_to(folder)}\0{len(data)}\0".encode())
        whole.update(data)
    return whole.hexdigest()


def find_compiler(search: str | None = None) -> Compiler:
    """$CXX; else g++, else the newest g++-NN. search: folders as in $PATH."""
    if given := os.environ.get("CXX"):
        return _checked(given, search)
    newest_first = [
        name for number in range(_NEWEST_GXX, LEAST_GXX - 1, -1) if (name := shutil.which(f"g++-{number}", path=search))
    ]
    plain = shutil.which("g++", path=search)
    if plain and (_major(plain) >= LEAST_GXX or not newest_first):
        return _checked(plain, search)
    if not newest_first:
        raise NotBuilt(f"no C++ compiler is found: {_install_compiler()}")
    return _checked(newest_first[0], search)


def _install_compiler() -> str:
    return (
        f"g++ {LEAST_GXX} or later is needed (apt-get install g++-{LEAST_GXX}, dnf install "
        f"gcc-toolset-{LEAST_GXX + 1}, conda install gxx), and CXX names it where it is not on the PATH"
    )


def _checked(name: str, search: str | None) -> Compiler:
    path = shutil.which(name, path=search)
    if path is None:
        raise NotBuilt(f"CXX names {name}, which is not found: {_install_compiler()}")
    version = _first_line([path, "--version"])
    if "clang" in version.lower() or (major := _major(path)) == 0:
        raise NotBuilt(f"{path} is no g++ (found {version or 'nothing that it says'}): {_install_compiler()}")
    if major < LEAST_GXX:
        raise NotBuilt(
            f"{path} is g++ {_first_line([path, '-dumpfullversion'])}, which is too old: {_install_compiler()}"
        )
    return Compiler(path, version)


def _major(path: str) -> int:
    found = re.match(r"(\d+)", _first_line([path, "-dumpfullversion"]))
    return int(found[1]) if found else 0


def _first_line(command: list[str]) -> str:
    try:
        said = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False).stdout
    except OSError:
        return ""
    return said.splitlines()[0] if said else ""


def check_python_headers() -> None:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise NotBuilt(
            f"Python's headers are not there (found no {header}): apt-get install python{version}-dev, dnf install "
            f"python{version}-devel"
        )


def program(name: str) -> str:
    """cmake or ninja: that of the environment's package, else that of the PATH."""
    try:
        packaged = (
            Path(getattr(importlib.import_module(name), f"{name.upper()}_BIN_DIR" if name == "cmake" else "BIN_DIR"))
            / name
        )
    except (ImportError, AttributeError):
        packaged = Path()
    found = str(packaged) if packaged.is_file() else shutil.which(name)
    if not found:
        raise NotBuilt(f"{name} is not found: pip install 'shardplan[torch]' brings it")
    return found


def jobs() -> int:
    """Compilers at once: no more than there are processors and memory for."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as lines:  # with what the kernel would give back
            available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    return max(1, min(len(os.sched_getaffinity(0)), available // _BYTES_PER_COMPILER))
