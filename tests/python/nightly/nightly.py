# SPDX-License-Identifier: Apache-2.0
"""Runs the nightly series, one after the other, within a time that it divides among them; each goes on where it was.

Parts of one to three minutes, of the series that has had the least time. The file out/nightly/state.json remembers how
far each came and is written after every part; an interrupted run loses the part it was in. The table is
out/nightly/YYYY-MM-DD-HHMM.md, and failures are kept in out/nightly/failures: the commands, their output and the files
that they left.
"""

from __future__ import annotations

import argparse
import fcntl
import pathlib
import signal
import sys

from nightly_parts import adopt_orphans
from nightly_run import Night, Series
from nightly_series import ALL, ROOT
from nightly_state import BadState

EXIT_BAD_INPUT = 3
EXIT_ENVIRONMENT = 4


def minutes(text: str) -> float:
    value = float(text)
    if not 0 < value <= 24 * 60:
        raise ValueError
    return value


def parsed(arguments: list[str], series: list[Series]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/nightly",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            "exit codes: 0 nothing failed, 1 something did, 2 usage, 3 bad state, 4 environment, 128 + n ended by "
            "signal n"
        ),
    )
    parser.add_argument("minutes", metavar="MINUTES", nargs="?", type=minutes, default=60.0, help="in all (default 60)")
    parser.add_argument("--only", metavar="SERIES[,SERIES]", help="these alone")
    parser.add_argument("--list", action="store_true", help="the series, and where each goes on")
    options = parser.parse_args(arguments)
    names = [one.name for one in series]
    chosen = names if options.only is None else options.only.split(",")
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"there is no series {unknown[0]!r}; there are {', '.join(names)}")
    options.series = [one for one in series if one.name in chosen]
    return options


class Signals:
    """Notes the signals that end the night. Handlers, not what was inherited: children begin with the defaults, also
    those of a nohup."""

    def __init__(self) -> None:
        self.number = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        signal.signal(signal.SIGHUP, (lambda number, frame: None) if ignored else self._note)
        if signal.getsignal(signal.SIGQUIT) == signal.SIG_IGN:
            signal.signal(signal.SIGQUIT, lambda number, frame: None)

    def _note(self, number: int, frame) -> None:
        self.number = number

    def __call__(self) -> bool:
        return self.number != 0


def main(arguments: list[str], series: list[Series] = ALL, out: pathlib.Path = ROOT / "out" / "nightly") -> int:
    options = parsed(arguments, series)
    out.mkdir(parents=True, exist_ok=True)
    try:
        if options.list:
            night = Night(options.series, 0, out, ROOT)
            for one in options.series:
                print(f"{one.name:18} at {night.place(one).position:<8} {one.what}")
            return 0
        with (out / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"tools/nightly: another one runs in {out}", file=sys.stderr)
                return EXIT_ENVIRONMENT
            stopped = Signals()
            adopt_orphans()
            night = Night(
                options.series, options.minutes, out, ROOT, stopped=stopped, say=lambda text: print(text, flush=True)
            )
            night.run_all()
            print(f"\n{night.table()}\n{night.write_table()}", flush=True)
            return 128 + stopped.number if stopped() else min(1, night.failures())
    except BadState as error:
        print(f"tools/nightly: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
