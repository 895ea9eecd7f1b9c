# SPDX-License-Identifier: Apache-2.0
"""Shared by the Python commands: how they print, and how they end."""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from shardplan import versions
from shardplan.installing import in_checkout

EXIT_USAGE, EXIT_ENVIRONMENT = 2, 4
_ENDS = (signal.SIGTERM, signal.SIGHUP)
_UNITS = {
    "": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "KB": 10**3, "MB": 10**6,
    "GB": 10**9, "TB": 10**12,
}
# Controls, separators of lines, marks of direction, and bytes that are no UTF-8 (surrogates): as schemas/printable.h
# has them.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class NoCommand(Exception):
    """The built command `shardplan` is not there, cannot be started, or is of another version."""


class _StandardOutputFailed(Exception):
    """Standard output cannot be written. No OSError: argparse passes those over."""


class _EndedBySignal(BaseException):
    """Unwinds the program, so that what it made for itself is removed."""


def printable(text: str) -> str:
    """`text` for a terminal; lines stay lines. Names in it may hold anything."""
    return _HIDDEN.sub(_escape, text)


def printable_name(text: str) -> str:
    """`text` in one line."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


class ArgumentParser(argparse.ArgumentParser):
    """Says what is wrong in one line: the words may hold anything."""

    def error(self, message: str) -> NoReturn:
        super().error(printable_name(message))


def built_command(name: str) -> str:
    """The program `shardplan` of this build, which starts the Python command `name`: in $SHARDPLAN_PROGRAMS, else on
    the PATH. Raises NoCommand."""
    folder = os.environ.get("SHARDPLAN_PROGRAMS", "")
    program = str(Path(folder) / "shardplan") if folder else shutil.which("shardplan")
    if not program or not Path(program).exists():
        raise NoCommand(
            f"the command shardplan is not found (found {program or 'none'}): run `shardplan {name}`, or set "
            "SHARDPLAN_PROGRAMS to its folder"
        )
    if problem := versions.why_not_program(program):
        raise NoCommand(problem)
    return program


def tests_of_repository(package: str) -> Path | None:
    """The folder tests/python of the checkout that this package lies in, which holds `package`. None: an installed one
    has no tests."""
    folder = Path(__file__).resolve().parents[3] / "tests" / "python"
    return folder if in_checkout() and (folder / package / "__init__.py").is_file() else None


def file_name(text: str) -> str:
    """The type of an argument that names a file: an empty one would count as none given."""
    if not text:
        raise argparse.ArgumentTypeError("names no file")
    return text


def bytes_of(text: str) -> int:
    """The type of an argument that is a size: 80GiB, 80GB, 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text)
    if not match or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text}: expected bytes, as 80GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def _escape(match: re.Match) -> str:
    code = ord(match.group())
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return {0x0D: "\\r"}.get(code, f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}")


class _StandardOutput(io.TextIOWrapper):
    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise _StandardOutputFailed(error.strerror or str(error)) from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise _StandardOutputFailed(error.strerror or str(error)) from error


class _StandardError(io.TextIOWrapper):
    """A failure to write is passed over: nobody could be told."""

    def write(self, text: str) -> int:
        try:
            return super().write(printable(text))
        except OSError:
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            pass


def run(name: str, main: Callable[[], int]) -> NoReturn:
    """Ends the process as `main` says: 4 where standard output cannot be written or the command that started it is of
    another version, by the signal that came while it ran."""
    _take_over_streams()
    if problem := versions.why_not(
        "the command shardplan", os.environ.get("SHARDPLAN_COMMAND_VERSION", versions.__version__)
    ):
        print(f"{name}: {problem}", file=sys.stderr)
        sys.exit(EXIT_ENVIRONMENT)
    ended = _handle_signals()
    try:
        code = _finished(main)
    except _StandardOutputFailed as error:
        print(f"{name}: cannot write to standard output: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still in the buffer
        code = EXIT_ENVIRONMENT
    except KeyboardInterrupt:
        ended.append(signal.SIGINT)
    except _EndedBySignal:
        pass
    if ended:
        signal.signal(ended[0], signal.SIG_DFL)
        os.kill(os.getpid(), ended[0])
    sys.exit(code)


def _finished(main: Callable[[], int]) -> int:
    try:
        code = main()
    except SystemExit as error:  # argparse
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    sys.stdout.flush()
    return code or 0


def _take_over_streams() -> None:
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: no file of ours gets the number
            os.open(os.devnull, os.O_WRONLY if descriptor == 2 else os.O_RDONLY)
    interactive = os.isatty(1)
    if sys.stdout is not None:
        sys.stdout.detach()
    if sys.stderr is not None:
        sys.stderr.detach()
    sys.stdout = _StandardOutput(
        open(1, "wb", closefd=False), encoding="utf-8", errors="backslashreplace", line_buffering=interactive
    )
    sys.stderr = _StandardError(
        open(2, "wb", closefd=False), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


def _handle_signals() -> list[int]:
    """The list gets the signal that ended the program."""
    ended: list[int] = []

    def end(number: int, _frame) -> None:
        if not ended:
            ended.append(number)
            raise _EndedBySignal

    for number in _ENDS:
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup leaves SIGHUP ignored
            signal.signal(number, end)
    return ended
