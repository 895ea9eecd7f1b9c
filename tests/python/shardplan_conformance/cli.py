# SPDX-License-Identifier: Apache-2.0
"""The command `shardplan conformance`."""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardplan.command import EXIT_ENVIRONMENT, printable, printable_name
from shardplan.files import CannotWrite, scratch_folder
from shardplan.installing import how_to_install, why_no_torch
from shardplan.terminal import complain

_DESCRIPTION = """\
Compare what shardplan computes with what PyTorch does, and say how many cases match."""

_EPILOG = """\
examples:
  shardplan conformance tests/conformance/fsdp2
  shardplan conformance --live mypackage.cases:my_model
  shardplan conformance --random 100 --policy fsdp1 --seed 1

DIR holds recordings: of events (CASE.log: each case is planned and compared event for event), or of memory (model.py \
and CASE.json with a
timeline: allocated bytes at every hook), or of optimizer states (a folder with
layout.json for each case: state dicts of FSDP1, value for value). MODULE:FUNCTION returns a \
shardplan_conformance.Case, or a list of them: it is traced, planned,
run on the installed PyTorch on this machine's CPU, and compared event for event. docs/internals/conformance.md says \
more.

exit codes: 0 every case matches, 1 one differs or cannot be run, 2 usage, 3 bad input, 4 environment"""

_POLICIES = ("fsdp2", "fsdp1")


@dataclass
class Counts:
    matched: int = 0
    compared: int = 0
    not_run: int = 0  # by PyTorch


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="shardplan conformance",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="a folder of recordings")
    result.add_argument("cases", nargs="*", metavar="CASE", help="of the folder (default: all)")
    result.add_argument(
        "--live", metavar="MODULE:FUNCTION", help="record the installed PyTorch on the cases it returns"
    )
    result.add_argument("--random", type=int, metavar="N", help="record the installed PyTorch on N random cases")
    result.add_argument("--seed", type=int, default=0, metavar="S", help="of the first random case (default: 0)")
    result.add_argument("--policy", choices=_POLICIES, help="of random cases (default: both, in turn)")
    result.add_argument(
        "--fake",
        action="store_true",
        help="one process, collectives that move nothing, instead of gloo on a process per rank",
    )
    result.add_argument("--keep", type=Path, metavar="DIR", help="leave traces, strategies and logs there")
    result.add_argument("--programs", type=Path, default=Path(), help=argparse.SUPPRESS)
    return result


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    chosen = [arguments.folder is not None, arguments.live is not None, arguments.random is not None]
    if sum(chosen) != 1:
        parser().error("one of DIR, --live and --random says what to compare")
    if arguments.random is not None and arguments.random < 1:
        parser().error(f"--random {arguments.random}: expected a number of cases")
    if arguments.folder is not None:
        return _compare_folder(arguments)
    if arguments.keep is not None:
        try:
            arguments.keep.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            complain("shardplan conformance", printable(f"cannot make the folder {arguments.keep}: {error.strerror}"))
            return EXIT_ENVIRONMENT
    if problem := why_no_torch():
        complain("shardplan conformance", printable(problem))
        return EXIT_ENVIRONMENT
    try:
        from shardplan.tracer.errors import TracerError
        from shardplan_conformance.case import CaseError
    except ImportError as error:
        complain(
            "shardplan conformance", f"cannot import {error.name} ({how_to_install('torch')} installs what is needed)"
        )
        return EXIT_ENVIRONMENT
    if arguments.programs != Path() and not _comparison(arguments).exists():  # else the one on the PATH
        wanted = "build the target shardplan-conformance"
        complain("shardplan conformance", printable(f"{_comparison(arguments)} is not built: {wanted}"))
        return EXIT_ENVIRONMENT
    try:
        return _compare_live(arguments)
    except CaseError as error:
        complain("shardplan conformance", printable(str(error)))
        return 3
    except TracerError as error:
        complain("shardplan conformance", printable(str(error)))
        return error.exit_code
    except CannotWrite as error:
        complain("shardplan conformance", printable(str(error)))
        return EXIT_ENVIRONMENT


def _compare_folder(arguments: argparse.Namespace) -> int:
    if os.path.isfile(arguments.folder / "model.py"):  # no error for a name that is too long
        from shardplan_conformance import memory

        return memory.run(arguments.folder, str(arguments.programs / "shardplan"), arguments.cases)
    if any(arguments.folder.glob("*/layout.json")):
        from shardplan_conformance import optim_state

        return optim_state.run(arguments.folder, str(arguments.programs / "shardplan"), arguments.cases)
    return subprocess.run([_comparison(arguments), arguments.folder, *arguments.cases], check=False).returncode


def _comparison(arguments: argparse.Namespace) -> Path:
    return arguments.programs / "shardplan-conformance"


def _compare_live(arguments: argparse.Namespace) -> int:
    from shardplan_conformance.ranks import Ranks, RecordingFailed

    counts, failures = Counts(), Counter()
    jobs = list(_live_jobs(arguments.live)) if arguments.live else None
    ranks = max(make().ranks for make in jobs) if jobs is not None else 4
    with scratch_folder() as made, Ranks(ranks, arguments.fake) as on:
        folder = arguments.keep or made
        for make in jobs if jobs is not None else _random_jobs(arguments):
            try:
                _compare_one(make, on, folder, arguments, counts)
            except RecordingFailed as error:
                counts.not_run += 1
                failures[str(error)] += 1
                print(printable(f"{printable_name(make().name)}: PyTorch does not run it: {error}"), flush=True)
    print(f"matched {counts.matched} of {counts.compared} cases", end="")
    print(f"; PyTorch does not run {counts.not_run}" if counts.not_run else "")
    differ = counts.matched < counts.compared or (arguments.live and counts.not_run)
    return 1 if differ else 0


def _live_jobs(source: str) -> Iterator[functools.partial]:
    from shardplan_conformance.case import load_cases

    for index in range(len(load_cases(source))):
        yield functools.partial(_nth_case, source, index)


def _nth_case(source: str, index: int):
    from shardplan_conformance.case import load_cases

    return load_cases(source)[index]


def _random_jobs(arguments: argparse.Namespace) -> Iterator[functools.partial]:
    from shardplan_conformance.random_cases import random_case

    for number in range(arguments.random):
        if arguments.policy:
            yield functools.partial(random_case, arguments.policy, arguments.seed + number)
        else:
            yield functools.partial(random_case, _POLICIES[number % 2], arguments.seed + number // 2)


def _compare_one(make: functools.partial, on, folder: Path, arguments: argparse.Namespace, counts: Counts) -> None:
    from shardplan_conformance import recording

    case = make()
    files = [folder / f"{case.name}{ending}" for ending in (".trace.json", ".strategy.json", ".log")]
    try:
        recording.write(make, functools.partial(on.record, make), folder)
        done = subprocess.run(
            [_comparison(arguments), folder, case.name], capture_output=True, text=True, check=False
        )
    finally:
        if arguments.keep is None:
            for file in files:
                file.unlink(missing_ok=True)
    counts.compared += 1
    counts.matched += done.returncode == 0
    report = done.stdout.rpartition("matched ")[0]
    print(report + done.stderr, end="", flush=True)
