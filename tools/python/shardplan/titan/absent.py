# SPDX-License-Identifier: Apache-2.0
"""Packages that torchtitan imports and a plan has no use for: data loading, images and logging. An empty one takes
the place of one that is not installed, and fails when something of it is used."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

# A package, and the module in whose place an empty one is.
_PACKAGES = {
    "av": "av", "datasets": "datasets", "einops": "einops", "PIL": "PIL", "tensorboard": "torch.utils.tensorboard",
    "torchdata": "torchdata", "torchvision": "torchvision",
}


class _Module(types.ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def init(self, *_, **__) -> None:
            raise ModuleNotFoundError(f"{type(self).__module__} is not installed, and {name} of it is used")

        made = type(name, (), {"__module__": self.__name__, "__init__": init,
                               "__class_getitem__": classmethod(lambda cls, _: cls)})
        setattr(made, name, made)  # where it is a module with a class of its name: annotations have PIL's Image.Image
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path=None, target=None):
        if any(fullname == name or fullname.startswith(name + ".") for name in self._names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module) -> None:
        module.__path__ = []


def stand_in() -> None:
    missing = {module for name, module in _PACKAGES.items() if importlib.util.find_spec(name) is None}
    if missing:
        sys.meta_path.insert(0, _Finder(missing))
