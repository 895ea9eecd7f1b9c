# SPDX-License-Identifier: Apache-2.0
"""Output for a person at a terminal alone: colours, and a bar that is drawn over again, as the C++ commands have them
(tools/cli/terminal.h)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

_CLEAR = "\r\x1b[K"
_WIDTH = 24
_REDRAW_S, _LINES_S = 0.1, 2.0


def is_a_terminal() -> bool:
    """Standard error is one that moves its cursor."""
    return os.isatty(2) and os.environ.get("TERM", "") not in ("", "dumb")


def bar_text(done: int, total: int, passed_s: float) -> str:
    part = min(1.0, max(0.0, done / total))
    full = int(part * _WIDTH)
    seconds = int((passed_s * (1 - part) / part if part > 0 else 0) + 0.5)
    minutes = seconds // 60
    left = f"{minutes}:{seconds % 60:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02} h"
    bar = "=" * full + (">" if full < _WIDTH else "")
    return f"[{bar:<{_WIDTH}}] {100 * part:3.0f} %  {left} left"


def complain(name: str, text: str) -> None:
    """An error of the command on standard error, its name red and bold unless NO_COLOR is set to anything
    (no-color.org). `text` is printable."""
    if is_a_terminal() and not os.environ.get("NO_COLOR"):
        _raw(f"\x1b[1;31m{name}:\x1b[0m {text}\n")
    else:
        print(f"{name}: {text}", file=sys.stderr, flush=True)


def _raw(text: str) -> None:
    """Past what shows control characters as escapes."""
    sys.stderr.flush()
    sys.stderr.buffer.write(text.encode("utf-8", "backslashreplace"))
    sys.stderr.buffer.flush()


class ProgressBar:
    """One line, as long as the work goes on: how much of it is done, and the time that is left at this pace. Without a
    terminal: `line` gets "7 of 20" every two seconds."""

    def __init__(self, what: str, line: Callable[[str], None], quiet: bool = False, first: int = 0) -> None:
        """first: what was done before, in no time."""
        self._what, self._line, self._quiet, self._first = what, line, quiet, first
        self._over = is_a_terminal()
        self._begin = self._last = time.monotonic()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    def end(self) -> None:
        """The line goes."""
        self._write(_CLEAR)

    def update(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._quiet or total <= 0 or (done < total and now - self._last < (_REDRAW_S if self._over else _LINES_S)):
            return
        self._last = now
        if not self._over:
            self._line(f"{done} of {total}")
        elif total > self._first:
            self._write(
                f"{_CLEAR}{self._what} {bar_text(max(0, done - self._first), total - self._first, now - self._begin)} "
                f" {done} of {total}"
            )

    def _write(self, text: str) -> None:
        if self._over and not self._quiet:
            _raw(text)
