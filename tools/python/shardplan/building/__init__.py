# SPDX-License-Identifier: Apache-2.0
"""The adapter, compiled for the torch at hand: by the first `import shardplan.torch`, the first `shardplan run`, or
`shardplan doctor --build`. The device in software: by the first `shardplan rehearse`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from . import cache, compile, machine
from .cache import cache_folder
from .errors import NotBuilt

__all__ = ["Built", "NotBuilt", "built", "built_device", "cache_folder", "comes_with_sources", "kept"]


@dataclasses.dataclass(frozen=True)
class Built:
    module: Path  # _shardplan.SOABI.so
    program: Path  # shardplan-run


def comes_with_sources() -> bool:
    """Whether this package is that of a wheel. A checkout builds with tools/build."""
    return (machine.SOURCES / "CMakeLists.txt").is_file()


def built() -> Built:
    """The module and the program for the torch, the Python and the compiler at hand. Imports torch. Compiles them where
    they are not kept yet; NotBuilt says why that cannot be done. Ranks of a node that call it together compile once."""
    return _adapter_in(_find(compile.ADAPTER, _get))


def kept() -> Built | None:
    """The same, where it is kept; None where `built` would compile it. NotBuilt: it could not."""
    folder = _find(compile.ADAPTER, lambda part, facts, compiler: cache.kept(_key(part, facts), compiler.key))
    return None if folder is None else _adapter_in(folder)


def built_device() -> Path:
    """The folder of libshardplan_device.so and its kernels, as `built`, and without an import of torch."""
    if (facts := machine.facts(imports_torch=False)).cuda == "None":
        raise NotBuilt(
            f"torch {facts.torch} is built without CUDA, whose code the device in software runs: pip install "
            f"torch=={facts.torch.split('+')[0]} (no GPU is needed)"
        )
    return _find(compile.DEVICE, _get, imports_torch=False)


def _adapter_in(folder: Path) -> Built:
    (module,) = folder.glob("_shardplan*.so")
    return Built(module, folder / "shardplan-run")


def _find(part: compile.Part, how, imports_torch: bool = True):
    facts = machine.facts(imports_torch)
    try:
        compiler = machine.find_compiler()
    except NotBuilt:
        if (found := cache.kept_of_any_compiler(_key(part, facts))) is not None:
            return found
        raise
    return how(part, facts, compiler)


def _get(part: compile.Part, facts: machine.Facts, compiler: machine.Compiler) -> Path:
    return cache.get(
        _key(part, facts), compiler.key, lambda folder: compile.compile_into(folder, part, facts, compiler)
    )


def _key(part: compile.Part, facts: machine.Facts) -> tuple[str, ...]:
    return (part.title, *dataclasses.astuple(facts))
