# SPDX-License-Identifier: Apache-2.0
"""Runs `shardplan rehearse --races` on settings.py, and reads what it says."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import re
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parents[2]
REPORT = re.compile(r"^race \d+(?: \((\d+) times\))?: (.*\n(?:  .*\n)+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Proof:
    code: int
    text: str

    @property
    def races(self) -> tuple[str, ...]:
        """The first line of each."""
        return tuple(re.findall(r"^race \d+.*$", self.text, re.MULTILINE))

    @property
    def reports(self) -> collections.Counter[str]:
        """How often each race is there: by what races and where, without addresses and streams."""
        found: collections.Counter[str] = collections.Counter()
        for times, block in REPORT.findall(self.text + "\n"):
            whole = re.sub(r"0x[0-9a-f]+ to 0x[0-9a-f]+|stream \d+", "", block)
            found[whole.partition("  missing")[0]] += int(times or 1)
        return found

    @property
    def accesses(self) -> int:
        found = re.search(r"\((\d+) accesses to memory\)", self.text)
        return int(found.group(1)) if found else 0

    @property
    def trained(self) -> int:
        found = re.search(r"^trained (\d+)$", self.text, re.MULTILINE)
        return int(found.group(1)) if found else 0

    @property
    def failed(self) -> list[str]:
        """Settings that do not train, with the error."""
        return re.findall(r"^failed .*$", self.text, re.MULTILINE)

    @property
    def reached(self) -> set[str]:
        """Edges that were taken out where the settings come by."""
        found = re.search(r"^reached(.*)$", self.text, re.MULTILINE)
        return set(found.group(1).split()) if found else set()

    @property
    def verdict(self) -> str:
        """"races", "none", or what went wrong."""
        if self.failed or not re.search(r"^(no races|\d+ races?) \(", self.text, re.MULTILINE):
            return f"exit code {self.code}: {' '.join(self.failed)} {self.text[-2000:]}"
        return "races" if self.races else "none"


def build_folder() -> pathlib.Path:
    return pathlib.Path(os.environ.get("SHARDPLAN_BUILD", ROOT / "build" / "dev"))


def prove(ranks: int, *command: object, record: str | None = None, timeout_s: float = 600) -> Proof:
    """The command is that of one rank's script, behind torchrun."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "tools" / "python"),
        "SHARDPLAN_PROGRAMS": str(build_folder() / "bin"),
        "SHARDPLAN_DEVICE_LIBRARY_FOLDER": os.environ.get(
            "SHARDPLAN_DEVICE_LIBRARY_FOLDER", str(build_folder() / "device")
        ),
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [
            sys.executable, "-m", "shardplan.rehearse", "--quiet", "--gpus", str(ranks), "--no-history", "--steps", "0",
            "--races", *(["--record", record] if record else []), "--",
            "torchrun", "--nproc_per_node", str(ranks), *map(str, command),
        ],
        capture_output=True, text=True, env=environment, timeout=timeout_s, check=False,
    )  # fmt: skip
    return Proof(done.returncode, done.stdout + done.stderr)


def of_settings(
    kind: str,
    ranks: int,
    only: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
    record: str | None = None,
) -> Proof:
    """without: names of edges.py that are taken out. more: flags of settings.py."""
    mutated = [FOLDER / "mutated.py", ",".join(without)] if without else []
    named = ["--only", *only] if only else []
    return prove(ranks, *mutated, FOLDER / "settings.py", kind, *named, *more, record=record)
