# SPDX-License-Identifier: Apache-2.0
"""Which modules a pattern means, as strategy documents and the command have them
(docs/reference/strategy-format.md)."""

from __future__ import annotations

import functools
import re


@functools.cache
def _compiled(pattern: str) -> re.Pattern:
    """'*' and '?' do not cross a '.'."""
    return re.compile(
        "".join({"*": "[^.]*", "?": "[^.]"}.get(character, re.escape(character)) for character in pattern)
    )


def matches(pattern: str, fqn: str, class_name: str = "") -> bool:
    """pattern: "class:NAME", or an FQN in which '*' and '?' do not cross a '.'."""
    if pattern.startswith("class:"):
        return class_name == pattern.removeprefix("class:")
    return _compiled(pattern).fullmatch(fqn) is not None
