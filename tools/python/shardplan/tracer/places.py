# SPDX-License-Identifier: Apache-2.0
"""The place of an error in a user's code: the module and the line."""

from __future__ import annotations

import linecache
import os
from types import FrameType

import torch
from torch import nn

# With the separator: torchtitan lies beside torch.
_OWN = tuple(
    os.path.join(folder, "")
    for folder in (
        os.path.dirname(os.path.abspath(torch.__file__)), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    )
)


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """With the line that runs, the innermost last."""
    found, entry = [], error.__traceback__
    while entry is not None:
        found.append((entry.tb_frame, entry.tb_lineno))
        entry = entry.tb_next
    return found


def _is_library(path: str) -> bool:
    return path.startswith(_OWN) or path.startswith("<") or f"{os.sep}site-packages{os.sep}" in path


def _is_own(path: str) -> bool:
    return path.startswith(_OWN) or path.startswith("<")


def _line(frames: list[tuple[FrameType, int]]) -> str:
    """The innermost line of the user's own, else of a library that is not torch."""
    for skip in (_is_library, _is_own):
        for frame, number in reversed(frames):
            path = frame.f_code.co_filename
            if skip(path):
                continue
            text = linecache.getline(path, number).strip()
            shown = os.path.relpath(path) if os.path.abspath(path).startswith(os.getcwd() + os.sep) else path
            return f"{shown}:{number}" + (f" `{text}`" if text else "")
    return ""


def place(error: BaseException, root: nn.Module | None) -> str:
    """' (in blocks.0.router (Router), at model.py:12 `if x.sum() > 0:`)', or what is known of it; '' when nothing
    is."""
    frames = _frames(error)
    parts = []
    if root is not None:
        names = {id(module): fqn for fqn, module in root.named_modules()}
        for frame, _ in reversed(frames):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and id(module) in names:
                parts.append(f"in {names[id(module)] or '(root)'} ({type(module).__name__})")
                break
    if line := _line(frames):
        parts.append(f"at {line}")
    return f" ({', '.join(parts)})" if parts else ""


def one_line(error: BaseException) -> str:
    """The first line of what the error says; of a compiler's error what it is about."""
    lines = str(error).strip().splitlines()
    if len(lines) > 1 and lines[0].endswith(" raised:"):
        return f"{lines[0]} {lines[1]}"
    return lines[0] if lines else ""
