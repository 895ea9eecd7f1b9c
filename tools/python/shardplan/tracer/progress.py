# SPDX-License-Identifier: Apache-2.0
"""The tracer's messages while it works."""

from __future__ import annotations


class Progress:
    """To nobody; the command's tells people."""

    def __call__(self, text: str) -> None:
        """It begins this."""

    def note(self, text: str) -> None:
        """A reader of the trace would not expect this."""

    def part(self, done: int, total: int) -> None:
        """Progress of the part that began last."""
