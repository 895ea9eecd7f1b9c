# SPDX-License-Identifier: Apache-2.0
"""Runs a part of a series: its steps one after the other, within a limit of time, with all processes that they
start."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pathlib
import re
import shlex
import signal
import subprocess
import time
import xml.etree.ElementTree
from collections.abc import Callable

POLL_S = 0.1
PR_SET_CHILD_SUBREAPER = 36
COUNTS = re.compile(r"cases (\d+), failures (\d+)")


@dataclasses.dataclass(frozen=True)
class Count:
    cases: int = 0
    failures: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.cases + other.cases, self.failures + other.failures)


@dataclasses.dataclass(frozen=True)
class Ended:
    """A step that ended by itself."""

    code: int
    output: str
    folder: pathlib.Path  # the part's

    def count_or_failure(self, found: Count | None) -> Count:
        """A step that says nothing of its cases, or of no failure but fails, is a failure."""
        if found is None:
            return Count(1, 1)
        return Count(max(found.cases, 1), 1) if self.code != 0 and found.failures == 0 else found


def last_line(ended: Ended) -> Count:
    """The last line of the output is `cases N, failures M`."""
    lines = ended.output.splitlines()
    said = COUNTS.fullmatch(lines[-1].strip()) if lines else None
    return ended.count_or_failure(Count(int(said[1]), int(said[2])) if said else None)


def junit(name: str) -> Callable[[Ended], Count]:
    """A JUnit file that the step writes into its folder. A test with a property `cases` stands for so many; what is
    skipped is no case."""

    def count(ended: Ended) -> Count:
        try:
            root = xml.etree.ElementTree.parse(ended.folder / name).getroot()
        except (OSError, xml.etree.ElementTree.ParseError):
            return ended.count_or_failure(None)
        found = Count()
        for test in root.iter("testcase"):
            if (
                test.find("skipped") is not None
                or test.get("status") in ("notrun", "disabled")
                or test.get("result") == "skipped"
            ):
                continue
            bad = test.find("failure") is not None or test.find("error") is not None
            number = next(
                (p.get("value") for p in test.iter("property") if p.get("name") == "cases"), test.get("cases")
            )
            found += Count(int(number or 1), bad)
        return ended.count_or_failure(found)

    return count


def exit_code(cases: int = 1) -> Callable[[Ended], Count]:
    """So many cases where it ends with 0, else one that failed."""
    return lambda ended: Count(cases) if ended.code == 0 else Count(1, 1)


@dataclasses.dataclass(frozen=True)
class Step:
    command: list[str]
    count: Callable[[Ended], Count]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    in_folder: bool = False  # runs in the part's folder, not in the repository

    def described(self) -> str:
        return " ".join(
            [*(f"{name}={shlex.quote(value)}" for name, value in self.environment.items()), shlex.join(self.command)]
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """how: "done", "over time", or "stopped" by the caller, who counts nothing of it then."""

    how: str
    count: Count
    seconds: float


def adopt_orphans() -> None:
    """Descendants whose parents end become this process's children, so that none outlives its part."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _is_alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def _children(pid: int) -> list[int]:
    try:
        tasks = list(pathlib.Path(f"/proc/{pid}/task").iterdir())
        found = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # it has ended
        return []
    return [child for child in found if _is_alive(child)]


def _descendants(pid: int) -> list[int]:
    return [one for child in _children(pid) for one in (child, *_descendants(child))]


def _end(process: subprocess.Popen, before: set[int]) -> None:
    """Ends the step and all that it has started: its group, and orphans of other sessions."""
    while True:
        process.poll()
        left = {pid for child in _children(os.getpid()) if child not in before for pid in (child, *_descendants(child))}
        if not left:
            break
        for pid in left:
            for number in (signal.SIGKILL, signal.SIGCONT):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    break
        time.sleep(0.02)
    process.wait()
    while True:  # orphans that were adopted
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def run_steps(
    steps: list[Step],
    limit_s: float,
    folder: pathlib.Path,
    root: pathlib.Path,
    stopped: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Runs the steps in order and adds their counts; `folder/output.txt` has what they said. A step beyond the limit is
    ended and is a failure."""
    begin = time.monotonic()
    total = Count()
    for step in steps:
        said = folder / "output.txt"
        with said.open("ab") as output:
            output.write(f"$ {step.described()}\n".encode())
            output.flush()
            start = output.tell()
            before = set(_children(os.getpid()))
            process = subprocess.Popen(
                step.command,
                cwd=folder if step.in_folder else root,
                env={**os.environ, **step.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            how = ""
            try:
                while not how and process.poll() is None:
                    try:
                        process.wait(POLL_S)
                    except subprocess.TimeoutExpired:
                        how = "stopped" if stopped() else "over time" if time.monotonic() - begin > limit_s else ""
            finally:
                _end(process, before)
        if how:
            return Outcome(how, total + Count(1, 1), time.monotonic() - begin)
        with said.open("rb") as output:
            output.seek(start)
            text = output.read().decode(errors="replace")
        total += step.count(Ended(process.returncode, text, folder))
    return Outcome("done", total, time.monotonic() - begin)
