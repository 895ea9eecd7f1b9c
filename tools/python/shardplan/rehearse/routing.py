# SPDX-License-Identifier: Apache-2.0
"""A histogram of experts: what share of the tokens each is given."""

from __future__ import annotations

import math
import re
from pathlib import Path

from shardplan.command import printable_name


class BadRouting(Exception):
    """The file is not there, or has no shares. The text says the position."""


def shares_of(path: str) -> tuple[float, ...]:
    """Numbers of at least 0, one a line or separated by commas, in the order of the experts; any scale. Raises
    BadRouting."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRouting(
            f"{printable_name(path)}: cannot be read ({getattr(error, 'strerror', None) or 'it is no text'})"
        ) from error
    shares = []
    for number, line in enumerate(lines, 1):
        for word in re.split(r"[,;\s]+", line.strip(", ;\t")):
            if word:
                shares.append(_share(path, number, word))
    if not any(shares):
        raise BadRouting(
            f"{printable_name(path)}: no expert has a share (found {'only zeros' if shares else 'no number'}, "
            "expected one number for each expert)"
        )
    return tuple(shares)


def _share(path: str, line: int, word: str) -> float:
    try:
        share = float(word)
    except ValueError:
        share = math.nan
    if not (math.isfinite(share) and share >= 0):
        raise BadRouting(
            f"{printable_name(path)}:{line}: found {printable_name(word)}, expected an expert's share, a number of at "
            "least 0"
        )
    return share
