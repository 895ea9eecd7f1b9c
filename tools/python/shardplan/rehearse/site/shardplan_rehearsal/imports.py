# SPDX-License-Identifier: Apache-2.0
"""Actions before and behind the import of a module, whoever imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

_before: dict[str, Callable[[], None]] = {}
_behind: dict[str, list[Callable[[ModuleType], None]]] = {}
_missing: dict[str, Callable[[], None]] = {}


class _Finder:
    """The first of sys.meta_path: it finds what the others find, and adds the actions to its loader."""

    def find_spec(self, name, path=None, target=None):
        if name not in _before and name not in _behind and name not in _missing:
            return None
        if (action := _before.pop(name, None)) is not None:
            action()
        spec = next(
            filter(None, (_find(finder, name, path, target) for finder in sys.meta_path if finder is not self)), None
        )
        if spec is None:
            if (action := _missing.pop(name, None)) is not None:
                action()
            return None
        _missing.pop(name, None)
        if name in _behind and spec.loader is not None:
            _run_behind(spec.loader, name)
        return spec


def _find(finder, name, path, target):
    find = getattr(finder, "find_spec", None)
    return find(name, path, target) if find is not None else None


def _run_behind(loader, name: str) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        for action in _behind.pop(name, []):
            action(module)

    loader.exec_module = exec_module


def _install() -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def before(name: str, action: Callable[[], None]) -> None:
    """Calls the action when the module is first looked for, found or not."""
    _install()
    _before[name] = action


def behind(name: str, action: Callable[[ModuleType], None]) -> None:
    """Calls the action with the module when it has been imported: at once where it is."""
    if name in sys.modules and name not in _behind and not _importing(sys.modules[name]):
        action(sys.modules[name])
        return
    _install()
    _behind.setdefault(name, []).append(action)


def missing(name: str, action: Callable[[], None]) -> None:
    """Calls the action when the module is looked for and is not there."""
    _install()
    _missing[name] = action


def _importing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
