# SPDX-License-Identifier: Apache-2.0
"""Variants of a torchtitan job: values of keys of its configuration. Each is a process that traces anew.
`shardplan torchtitan --vary` and `shardplan sweep` take them from here."""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shardplan import files

Values = Iterable[tuple[str, str]]  # of keys

_SUBCOMMANDS = ("activation_checkpoint", "activation-checkpoint")  # of torchtitan's parser, among its keys
_SOURCE = "torchtitan:"


def is_key(name: str) -> bool:
    """Is it a key of torchtitan's, and no flag of `shardplan plan`?"""
    return "." in name or name in _SUBCOMMANDS


def varied(text: str) -> tuple[str, list[str]]:
    """The type of an argument KEY=A,B: the key, its values; with | between them where a value has a comma."""
    key, equals, values = text.partition("=")
    found = values.split("|" if "|" in values else ",")
    if not equals or key.startswith("-") or not is_key(key) or not all(found):
        raise argparse.ArgumentTypeError(
            f"{text}: expected SECTION.KEY=VALUE,VALUE, a key of torchtitan's, or activation_checkpoint=full,none"
        )
    return key, found


def is_job(source: str) -> bool:
    return source.startswith(_SOURCE)


def job_of(source: str) -> list[str]:
    """torchtitan's arguments of torchtitan:MODULE:CONFIG. ValueError for what is none."""
    module, _, config = source.removeprefix(_SOURCE).partition(":")
    if not module or not config:
        raise ValueError(f"{source}: expected torchtitan:MODULE:CONFIG, as torchtitan:llama3:llama3_8b")
    return ["--module", module, "--config", config]


@dataclass(frozen=True)
class Made:
    """How the process ended."""

    exit_code: int
    said: str

    @property
    def why(self) -> str:
        """The command's error in a line: the last one that it says, or the first part of the frame that torchtitan's
        parser draws."""
        lines = [line.strip() for line in self.said.splitlines() if line.strip() and ": note: " not in line]
        frames = [number for number, line in enumerate(lines) if line.startswith("╭")]
        if frames:
            inside = (line.strip("│ ") for line in lines[frames[-1] + 1 :])
            return " ".join(itertools.takewhile(lambda line: line.strip("╰─╯"), inside))
        return lines[-1].removeprefix("shardplan torchtitan: ") if lines else f"exit code {self.exit_code}"


def make(job: list[str], values: Values, options: list[str], folder: Path) -> Made:
    """Runs `shardplan torchtitan` on a variant of the job. options: the command's own. folder: gets what it makes."""
    values = list(values)
    flags = [word for key, value in values if key not in _SUBCOMMANDS for word in (f"--{key}", value)]
    subcommands = [f"{key}:{value}" for key, value in values if key in _SUBCOMMANDS]
    # No flag may come behind a subcommand of torchtitan's parser, and `job` may end with one.
    command = [sys.executable, "-m", "shardplan.titan", *options, "-q", "-o", str(folder), *flags, *job, *subcommands]
    done = subprocess.run(
        command, check=False, capture_output=True, encoding="utf-8", errors="backslashreplace"
    )
    return Made(done.returncode, done.stderr)


def tokens_per_second(folder: Path, report: dict) -> int:
    """All ranks' together, by the plan and the report in the folder."""
    plan = json.loads(files.read_text(folder / "plan.json"))
    tokens = plan["tokens_per_step"] * plan["world_size"] // plan.get("ranks_per_batch", 1)
    return tokens * 10**9 // report["step_ns"]
