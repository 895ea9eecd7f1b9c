# SPDX-License-Identifier: Apache-2.0
"""Replaces attributes of PyTorch's classes for the time of a recording."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from shardplan_conformance.case import CaseError


class Patches:
    """Hooks go in when the object is entered and out when it is left."""

    def __init__(self) -> None:
        self._wanted: list[tuple[object, str, Callable]] = []
        self._saved: list[tuple[object, str, object, bool]] = []

    def wrap(self, owner, name: str, make: Callable[[Callable], Callable]) -> None:
        """`make` gets the original function and returns the one that takes its place."""
        if not hasattr(owner, name):
            raise CaseError(
                f"torch {torch.__version__} has no {getattr(owner, '__qualname__', owner.__name__)}.{name}, where an "
                "event is recorded:"
                " its FSDP is organised differently from the one that is planned"
            )
        self._wanted.append((owner, name, make))

    def before(self, owner, name: str, tell: Callable) -> None:
        """`tell` is called with the arguments of the call that follows."""

        def make(original):
            @functools.wraps(original)
            def replaced(*args, **kwargs):
                tell(*args, **kwargs)
                return original(*args, **kwargs)

            return replaced

        self.wrap(owner, name, make)

    def __enter__(self) -> "Patches":
        for owner, name, make in self._wanted:
            original = getattr(owner, name)
            own = name in vars(owner)
            self._saved.append((owner, name, vars(owner)[name] if own else None, own))
            setattr(owner, name, make(original))
        return self

    def __exit__(self, *_error) -> None:
        for owner, name, saved, own in reversed(self._saved):
            if own:
                setattr(owner, name, saved)
            else:
                delattr(owner, name)
        self._saved.clear()
