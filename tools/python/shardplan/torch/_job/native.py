# SPDX-License-Identifier: Apache-2.0
"""Finds and loads the compiled module `_shardplan`: an installed one, that of a build folder of the repository, or one
that is compiled for this torch."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import sys
import types
import typing

import torch  # noqa: F401  (its libraries must be loaded before ours)

from shardplan import versions
from shardplan.building import NotBuilt, built, comes_with_sources
from shardplan.installing import in_checkout


def _build_folders() -> list[pathlib.Path]:
    """Folders in which a build leaves the module: $SHARDPLAN_BUILD, else those of the presets, newest module first.

    Builds of sanitizers are taken only if $SHARDPLAN_BUILD names them: an interpreter without their runtime ends at the
    import.
    """
    if build := os.environ.get("SHARDPLAN_BUILD"):
        return [pathlib.Path(build) / "python"]
    if not in_checkout():
        return []
    root = pathlib.Path(__file__).resolve().parents[5]
    modules = [
        module
        for module in (root / "build").glob("*/python/_shardplan*.so")
        if module.parts[-3] not in ("asan", "tsan")
    ]
    return [module.parent for module in sorted(modules, key=lambda m: m.stat().st_mtime, reverse=True)]


def _load() -> types.ModuleType:
    refused = []  # built with another torch: its symbols are not there
    for folder in (None, *_build_folders()):
        path = [] if folder is None else [str(folder)]
        sys.path.extend(path)
        try:
            return importlib.import_module("_shardplan")
        except ModuleNotFoundError:
            pass
        except ImportError as error:
            refused.append(f"{folder or 'the installed one'} does not load with torch {torch.__version__}: {error}. ")
        finally:
            for entry in path:
                sys.path.remove(entry)
    if comes_with_sources():
        if refused:
            print(f"shardplan: {''.join(refused)}Another one is compiled", file=sys.stderr, flush=True)
        return _load_compiled()
    state = "is built with another torch" if refused else "is neither installed nor built"
    remedy = "Install the wheel of shardplan-torch that belongs to this torch"
    if in_checkout():
        remedy = "Run `tools/build dev`"
    raise ImportError(
        f"shardplan.torch needs the compiled module _shardplan, which {state}. {''.join(refused)}"
        f"{remedy}, or set SHARDPLAN_BUILD to a build folder."
    )


def _load_compiled() -> types.ModuleType:
    try:
        path = built().module
    except NotBuilt as error:
        raise NotBuilt(f"shardplan.torch needs its compiled module: {error}") from None
    spec = importlib.util.spec_from_file_location("_shardplan", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["_shardplan"] = module
    return module


if typing.TYPE_CHECKING:
    import _shardplan as native
else:
    native = _load()
    if problem := versions.why_not(f"the compiled module {native.__file__}", native.__version__, "shardplan-torch"):
        raise ImportError(problem)
