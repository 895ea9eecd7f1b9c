# SPDX-License-Identifier: Apache-2.0
"""Commands of dev/check_torch and dev/wheels: a log for each, and a line of progress while it runs."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field

PROGRESS_S = 60


@dataclass
class Result:
    """The outcome of a stage, or of a part of one."""

    name: str
    result: str  # in a few words
    seconds: float = 0.0
    different: list[str] = field(default_factory=list)  # one line each
    failed: bool = False  # the stage could not do its work


def say(text: str) -> None:
    print(f"{pathlib.Path(sys.argv[0]).name}: {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def last_line(log: pathlib.Path) -> str:
    lines = (
        [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    )
    return lines[-1][:120] if lines else "nothing said"


def run(
    command: list, log: pathlib.Path, cwd: pathlib.Path, environment: dict[str, str] | None = None, alone: bool = False
) -> int:
    """The exit code. Output goes to the log alone. alone: the environment is the given one, without this process's."""
    log.parent.mkdir(parents=True, exist_ok=True)
    started = told = time.monotonic()
    with open(log, "wb") as output:
        child = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={**({} if alone else os.environ), **(environment or {})},
        )
        try:
            while child.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - told > PROGRESS_S:
                    told = time.monotonic()
                    say(f"{log.stem}, {told - started:.0f} s: {last_line(log)}")
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    return child.returncode


def junit(path: pathlib.Path) -> tuple[str, list[str]]:
    """"12 passed, 1 failed, 2 skipped", and a line for each test that failed."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        faults = [child for child in case if child.tag in ("failure", "error")]
        kind = "failed" if faults else "skipped" if case.find("skipped") is not None else "passed"
        counts[kind] += 1
        if faults:
            message = (faults[0].get("message") or faults[0].text or "").strip().splitlines()
            failures.append(
                f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}: "
                f"{message[0][:160] if message else 'no message'}"
            )
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "no test", failures


def table(results: list[Result]) -> list[str]:
    rows = [f"| {r.name} | {r.result} | {r.seconds:.0f} |" for r in results]
    return ["| stage | result | s |", "|---|---|---|", *rows]


def report(version: str, base: str, results: list[Result]) -> str:
    """The page that is printed and written: the table, then what is different, one line each."""
    lines = [f"# torch {version}, next to what is planned of {base}", "", *table(results)]
    for result in results:
        if result.different:
            lines += ["", f"## {result.name}", *(f"- {line}" for line in result.different)]
    if not any(result.different or result.failed for result in results):
        lines += ["", "Nothing is different."]
    return "\n".join(lines) + "\n"
