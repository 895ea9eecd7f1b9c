# SPDX-License-Identifier: Apache-2.0
"""The adapter, compiled for the torch at hand: by the first `import shardplan.torch`, the first `shardplan run`, or `shardplan doctor --build`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from . import cache, compile, machine
from .cache import Built, cache_folder
from .errors import NotBuilt

__all__ = ["Built", "NotBuilt", "built", "cache_folder", "comes_with_sources", "kept"]


def comes_with_sources() -> bool:
    """Whether this package is that of a wheel. A checkout builds with tools/build."""
    return (machine.SOURCES / "CMakeLists.txt").is_file()


def built() -> Built:
    """The module and the program for the torch, the Python and the compiler at hand. Imports torch. Compiles them where they are not kept yet; NotBuilt says
    why that cannot be done. Ranks of a node that call it together compile once."""
    return _find(lambda facts, compiler: cache.get(dataclasses.astuple(facts), compiler.key, lambda folder: _make(folder, facts, compiler)))


def kept() -> Built | None:
    """The same, where it is kept; None where `built` would compile it. NotBuilt: it could not."""
    return _find(lambda facts, compiler: cache.kept(dataclasses.astuple(facts), compiler.key))


def _find(how):
    facts = machine.facts()
    try:
        compiler = machine.find_compiler()
    except NotBuilt:
        if (found := cache.kept_of_any_compiler(dataclasses.astuple(facts))) is not None:
            return found
        raise
    return how(facts, compiler)


def _make(folder: Path, facts: machine.Facts, compiler: machine.Compiler) -> None:
    compile.compile_into(folder, facts, compiler)
