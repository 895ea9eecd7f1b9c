# SPDX-License-Identifier: Apache-2.0
"""Functions whose kernels a fake tensor cannot run, and what stands in for them while a model is traced: `standing_in`.

`SHIPPED` has those of common libraries. They need not be installed: a library that is not there is a module of its
stand-ins alone as long as the trace goes on. The user's own (--stand-in) are added, or replace them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import types
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from shardplan.tracer.errors import TracerError, UsageProblem
from shardplan.tracer.places import one_line
from shardplan.tracer.stand_ins import causal_conv1d, fla, mamba_ssm
from shardplan.tracer.stand_ins.launch import Kernel, launch, run, type_name

__all__ = ["SHIPPED", "Kernel", "launch", "load", "standing_in"]

# By the name that a program imports the function by: what stands in for it.
SHIPPED: dict[str, Callable] = {
    "causal_conv1d.causal_conv1d_fn": causal_conv1d.causal_conv1d_fn,
    "mamba_ssm.ops.selective_scan_interface.mamba_inner_fn": mamba_ssm.mamba_inner_fn,
    "mamba_ssm.ops.selective_scan_interface.selective_scan_fn": mamba_ssm.selective_scan_fn,
    "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined": mamba_ssm.mamba_chunk_scan_combined,
    "mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined": mamba_ssm.mamba_split_conv1d_scan_combined,
    "fla.ops.gated_delta_rule.chunk_gated_delta_rule": fla.chunk_gated_delta_rule,
    "fla.ops.kda.chunk_kda": fla.chunk_kda,
}

def _nothing(*_arguments, **_options) -> None:
    pass


# They ask for the kernels of a package that a trace does not need: the operators in front of them are torch's own.
_SETTINGS = ("torch.nn.attention.activate_flash_attention_impl",)

# Functions for generation that models import beside those, of libraries that are not here. No training step calls them.
_FOR_GENERATION = (
    "causal_conv1d.causal_conv1d_update",
    "mamba_ssm.ops.triton.selective_state_update.selective_state_update",
    "fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule",
    "fla.ops.kda.fused_recurrent_kda",
)


def load(texts: list[str]) -> dict[str, Callable | None]:
    """The user's own, each "package.module.function=FILE:callable"; "=none" takes a shipped one away. Raises
    TracerError."""
    own: dict[str, Callable | None] = {}
    for text in texts:
        name, function = _loaded(text)
        if name in own:
            raise UsageProblem(f"--stand-in {text}: {name} has one already; expected one for each function")
        own[name] = function
    return own


def _loaded(text: str) -> tuple[str, Callable | None]:
    name, equals, place = text.partition("=")
    path, _, attribute = place.rpartition(":")
    dotted = "." in name and all(part.isidentifier() for part in name.split("."))
    if not equals or not dotted or not (place == "none" or (path and attribute)):
        raise UsageProblem(
            f"--stand-in {text}: expected package.module.function=FILE:callable, or package.module.function=none"
        )
    if place == "none":
        if name not in SHIPPED:
            raise UsageProblem(f"--stand-in {text}: nothing stands in for {name}; what does: {', '.join(SHIPPED)}")
        return name, None
    return name, _called_by(name, place, _callable_in(Path(path), attribute, text))


def _callable_in(path: Path, attribute: str, text: str) -> Callable:
    if not path.is_file():
        raise TracerError(
            f"--stand-in {text}: {path}: {'no such file' if not path.exists() else 'a folder; expected a Python file'}"
        )
    name = f"shardplan_stand_in_{path.stem}"
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    # dataclasses look there; not for longer: what the file imported is not to be replaced in it.
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise TracerError(f"--stand-in {text}: {path} failed: {type(error).__name__}: {one_line(error)}") from error
    finally:
        del sys.modules[name]
    found = getattr(module, attribute, None)
    if not callable(found):
        own = [
            key
            for key, value in vars(module).items()
            if isinstance(value, types.FunctionType) and value.__module__ == name
        ]
        raise TracerError(f"--stand-in {text}: {path} has no callable {attribute}; it has {', '.join(own) or 'none'}")
    return found


def _called_by(name: str, place: str, function: Callable) -> Callable:
    """`function`, of FILE:callable `place`, as the model calls `name`: its own mistakes are not the model's."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of something built in
        return function

    @functools.wraps(function)
    def called(*arguments, **options):
        try:
            signature.bind(*arguments, **options)
        except TypeError as error:
            given = [type_name(argument) for argument in arguments] + [f"{key}=" for key in options]
            what = f"the model calls it with ({', '.join(given)}): {error}; expected the function's own parameters"
            raise TracerError(f"the stand-in for {name}, {place}, takes {signature}; {what}") from error
        try:
            return function(*arguments, **options)
        except _MISTAKES as error:
            raise TracerError(
                f"the stand-in for {name}, {place}, failed: {type(error).__name__}: {one_line(error)}"
            ) from error

    return called


# Python's own errors; torch's are RuntimeErrors, and the session knows what to say of them.
_MISTAKES = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)


_active: list[str] | None = None  # while standing_in: functions that were stood in for, in order of their first call


def called() -> list[str]:
    return list(_active or ())


def _observed(name: str, function: Callable, called: list[str]) -> Callable:
    @torch.compiler.disable  # a compiled graph ends before it, as before fla's own functions
    @functools.wraps(function)  # transformers asks for its parameters
    def stand_in(*arguments, **options):
        if name not in called:
            called.append(name)
        return run(name, function(*arguments, **options), (arguments, options))

    return stand_in


def _refused(name: str) -> Callable:
    def refused(*_arguments, **_options):
        raise TracerError(
            f"the model calls {name}, which is for generation and has no stand-in; --stand-in {name}=FILE:callable "
            "gives one"
        )

    return refused


@contextlib.contextmanager
def standing_in(own: dict[str, Callable | None]) -> Iterator[None]:
    """Inside, the table's functions are their stand-ins, wherever they were imported. Entered again inside, nothing
    changes."""
    global _active
    if _active is not None:
        yield
        return
    _active = []
    table = {
        name: _observed(name, function, _active)
        for name, function in {**SHIPPED, **own}.items()
        if function is not None
    }
    try:
        with contextlib.ExitStack() as stack:
            for name, function in table.items():
                stack.enter_context(_replaced(name, function, required=name in own))
            for name in _SETTINGS:
                if name not in table:
                    stack.enter_context(_replaced(name, _nothing, required=False))
            for name in _FOR_GENERATION:
                if name not in table and _owner(name, required=False)[0] is None:
                    table[name] = _refused(name)
                    stack.enter_context(_replaced(name, table[name], required=False))
            stack.enter_context(_in_transformers(table))
            yield
    finally:
        _active = None


@contextlib.contextmanager
def _replaced(name: str, function: Callable, required: bool) -> Iterator[None]:
    owner, attribute = _owner(name, required)
    with contextlib.ExitStack() as stack:
        if owner is None:
            owner = stack.enter_context(_absent_module(name.rpartition(".")[0]))
        original = getattr(owner, attribute, None)
        stack.enter_context(
            unittest.mock.patch.object(owner, attribute, _as_in(owner, attribute, function), create=True)
        )
        for module in list(sys.modules.values()) if original is not None else ():
            for known in (
                [key for key, value in list(vars(module).items()) if value is original]
                if isinstance(module, types.ModuleType)
                else ()
            ):
                stack.enter_context(unittest.mock.patch.object(module, known, function))
        yield


def _as_in(owner: object, attribute: str, function: Callable) -> object:
    """The function as the class holds what it replaces: of a method it gets the object first, of a class method the
    class."""
    held = inspect.getattr_static(owner, attribute, None) if isinstance(owner, type) else None
    return type(held)(function) if isinstance(held, (staticmethod, classmethod)) else function


def _owner(name: str, required: bool) -> tuple[object | None, str]:
    """The module or class that holds the function, None: its library is not here, or cannot be imported here; and the
    function's name in it."""
    path, _, attribute = name.rpartition(".")
    library, parts, reason = path.partition(".")[0], path.split("."), ""
    if library not in sys.modules and importlib.util.find_spec(library) is None:
        return None, attribute
    for end in range(len(parts), 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:end]))
        except Exception as error:  # a class in the name, or a library that does not load without its device
            reason = reason or f": {type(error).__name__}: {error}"
            continue
        for part in parts[end:]:
            owner = getattr(owner, part, None)
        if hasattr(owner, attribute):
            return owner, attribute
    if required:
        raise TracerError(f"--stand-in {name}=...: there is no such function{reason}")
    return None, attribute


@contextlib.contextmanager
def _absent_module(path: str) -> Iterator[types.ModuleType]:
    """A module of that name, and its parents, as far as they are not there."""
    made, parent = [], None
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        module = sys.modules.get(name) or (None if made else _importable(name))
        if module is None:
            module = types.ModuleType(name, "Stand-ins of shardplan for a library that is not here.")
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            module.__path__ = []
            sys.modules[name] = module
            made.append((name, parent))
            if parent is not None:
                setattr(parent, parts[end - 1], module)
        parent = module
    try:
        yield parent
    finally:
        for name, holder in reversed(made):
            del sys.modules[name]
            if holder is not None:
                delattr(holder, name.rpartition(".")[2])


def _importable(name: str) -> types.ModuleType | None:
    try:
        return importlib.import_module(name)
    except Exception:
        return None


@contextlib.contextmanager
def _in_transformers(table: dict[str, Callable]) -> Iterator[None]:
    """transformers binds a kernel, or its own fallback, when it imports a model
    (use_kernel_func_from_hub_with_fallback). Models that were imported before get the stand-in for as long as the trace
    goes on; those that it imports give theirs back."""
    by_function = {(name.partition(".")[0], name.rpartition(".")[2]): function for name, function in table.items()}
    before = {id(wrapper): (wrapper, _bound(wrapper)) for wrapper in _wrappers()}
    for wrapper, bound in before.values():
        function = by_function.get((bound["package"], bound["func_name"]))
        if function is not None:
            _bind(wrapper, function)
    try:
        yield
    finally:
        stand_ins = set(map(id, table.values()))
        for wrapper in _wrappers():
            bound = _bound(wrapper)
            if id(bound["implementation"]) in stand_ins:
                _, earlier = before.get(id(wrapper), (None, {"implementation": bound["torch_function"]}))
                _bind(wrapper, earlier["implementation"])


def _wrappers() -> Iterator[types.FunctionType]:
    for path, module in list(sys.modules.items()):
        if not path.startswith("transformers.models.") or ".modeling_" not in path:
            continue
        for value in list(vars(module).values()):
            while isinstance(value, types.FunctionType) and not _WRAPPED <= set(value.__code__.co_freevars):
                value = getattr(value, "__wrapped__", None)
            if isinstance(value, types.FunctionType):
                yield value


_WRAPPED = {"func_name", "package", "implementation", "torch_function", "is_new_implementation", "applicable_params"}


def _bound(wrapper: types.FunctionType) -> dict[str, object]:
    return {name: cell.cell_contents for name, cell in zip(wrapper.__code__.co_freevars, wrapper.__closure__ or ())}


def _bind(wrapper: types.FunctionType, implementation: Callable) -> None:
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or ()))
    cells["is_new_implementation"].cell_contents = implementation is not cells["torch_function"].cell_contents
    cells["applicable_params"].cell_contents = tuple(inspect.signature(implementation).parameters)
    cells["implementation"].cell_contents = implementation
