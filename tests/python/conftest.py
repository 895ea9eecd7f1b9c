# SPDX-License-Identifier: Apache-2.0
"""Shared by the Python tests: the places of the repository and of the built programs."""

import contextlib
import gc
import importlib.metadata
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# `nohup tools/test &` starts the suite with these ignored, and its children would ignore them, too: what has a handler,
# they begin with the default of.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda _number, _frame: None)


class _Frozen:
    """Modules that are imported stay, and the garbage collector need not look at them again. With torch and
    transformers imported, a collection takes half a second, and the tracer begins each recording with one."""

    modules = 0

    def pytest_runtest_setup(self) -> None:
        if len(sys.modules) != self.modules:
            self.modules = len(sys.modules)
            gc.collect()
            gc.freeze()

    def pytest_sessionfinish(self) -> None:
        gc.unfreeze()  # libraries that count what is left at the end would complain


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Frozen())


def build_folder() -> pathlib.Path:
    """The build that is tested: $SHARDPLAN_BUILD, else build/dev."""
    return pathlib.Path(os.environ.get("SHARDPLAN_BUILD", ROOT / "build" / "dev")).resolve()


@contextlib.contextmanager
def plans_in(folder: pathlib.Path):
    """Inside, processes that are started train by this build, and keep the plans that `sp.auto` makes in the folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDPLAN_BUILD", str(build_folder()))
        patch.setenv("SHARDPLAN_PLANS", str(folder))
        yield


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def installed_pytorch() -> str:
    """The release of the installed torch, as a strategy names it: "2.15". Tests that differ between releases ask
    here."""
    return ".".join(importlib.metadata.version("torch").split(".")[:2])


def on_device(command: list[str], mode: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs a command on the device in software (docs/internals/device.md)."""
    library = build_folder() / "device" / "libshardplan_device.so"
    if not library.exists():
        pytest.skip(f"{library} is not built: torch has no CUDA, or the build has sanitizers")
    # torch looks for NVML there.
    folders = ":".join(filter(None, [str(library.parent), os.environ.get("LD_LIBRARY_PATH")]))
    own = {
        **os.environ, "LD_PRELOAD": str(library), "LD_LIBRARY_PATH": folders, "SHARDPLAN_DEVICE_MODE": mode,
        **environment,
    }
    return subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    return ROOT


@pytest.fixture(scope="session")
def shardplan():
    """Runs the built command: shardplan("plan", "x.json") -> CompletedProcess with text output."""
    program = build_folder() / "bin" / "shardplan"
    if not program.exists():
        pytest.fail(f"{program} is not built: run tools/build dev, or set SHARDPLAN_BUILD")

    def run(*arguments, cwd=None, timeout=120, **environment):
        return subprocess.run(
            [str(program), *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=cwd or ROOT,
            timeout=timeout,
            env={**os.environ, **environment},
        )

    return run
