# SPDX-License-Identifier: Apache-2.0
"""A trace made of the module tree alone: modules run once each, in the order of their registration, and pass their
gradients back in the reverse order. Most models do; for the others it is where the first plan begins, and their first
step says what they really do."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch.nn as nn

from shardplan.tracer.module_tree import gradient_fields

from .fit import ModelParameter, dtype_name, modules_of, parameters_of, unwrapped

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def module_entries(names: dict[str, str], parameters: list[dict]) -> list[dict]:
    """A trace's `modules`: the tree, and each parameter in the modules that hold it. names: FQN -> class name, in tree
    order."""
    children: dict[str, list[str]] = {}
    for fqn in names:
        if fqn:
            parent, _, own = fqn.rpartition(".")
            children.setdefault(parent, []).append(own)
    held: dict[str, list[dict]] = {}
    for number, parameter in enumerate(parameters):
        for name in (parameter["fqn"], *parameter.get("shared_with", ())):
            owner, _, own = name.rpartition(".")
            held.setdefault(owner, []).append({"name": own, "parameter": number})
    documents = []
    for fqn, class_name in names.items():
        entry: dict[str, Any] = {"fqn": fqn, "class_name": class_name}
        if fqn in children:
            entry["children"] = children[fqn]
        if fqn in held:
            entry["parameters"] = held[fqn]
        documents.append(entry)
    return documents


def class_names(model: nn.Module) -> dict[str, str]:
    """FQN -> class name of every module, in tree order, without wrappers."""
    return {fqn: type(unwrapped(module)).__name__ for fqn, module in modules_of(model).items()}


def _parameter_entries(by_fqn: dict[str, ModelParameter], placed: Mapping[str, list[dict]]) -> list[dict]:
    entries = []
    for fqn, found in by_fqn.items():
        if found.slots[0].fqn != fqn:
            continue
        parameter = found.parameter
        part = getattr(parameter, "_local_tensor", parameter)
        entry: dict[str, Any] = {"fqn": fqn, "shape": list(part.shape), "dtype": dtype_name(parameter.dtype)}
        if not parameter.requires_grad:
            entry["requires_grad"] = False
        entry.update(gradient_fields(parameter))
        if others := [slot.fqn for slot in found.slots[1:]]:
            entry["shared_with"] = others
        if placed.get(fqn):
            entry["placements"] = copy.deepcopy(placed[fqn])
        entries.append(entry)
    return entries


class _Walk:
    """Events of a forward, and of its backward in reverse."""

    def __init__(self, model: nn.Module, names: dict[str, str], numbers: dict[str, int]) -> None:
        self.tensors: list[dict] = []
        self.forward: list[list] = []
        self._backward: list[list] = []  # last event first
        self._modules = modules_of(model)
        self._ids = {fqn: number for number, fqn in enumerate(names)}
        self._numbers = numbers  # of parameters, by every FQN
        self._seen: set[int] = set()
        self._made: set[int] = set()  # parameters that have a place in the backward
        self._trains = False  # has a parameter that trains been used?
        self._module("")

    @property
    def backward(self) -> list[list]:
        return [*reversed(self._backward), ["backward_end"]]

    def _module(self, fqn: str) -> None:
        module = unwrapped(self._modules[fqn])
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        called = not isinstance(module, _NEVER_CALLED)
        if called:
            self.forward.append(["enter", self._ids[fqn], []])
            if self._trains:
                self._backward.append(["inputs_done", self._ids[fqn], 0, 0])
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                self._trains = True
                number = self._numbers[f"{fqn}.{name}" if fqn else name]
                if number not in self._made:
                    self._made.add(number)
                    self._backward.append(["param_grad", number, -1])
        for name, child in module._modules.items():
            if child is not None:
                self._module(f"{fqn}.{name}" if fqn else name)
        if called:
            # A root returns the tensor that its last module has made, whose hooks are asked first.
            passes_on = not fqn and bool(self.tensors)
            if not passes_on:
                self.tensors.append({"shape": [1], "dtype": "float32", "requires_grad": self._trains})
            self.forward.append(["exit", self._ids[fqn], [len(self.tensors) - 1]])
            if self._trains:
                self._backward.insert(len(self._backward) - passes_on, ["grad_ready", self._ids[fqn], 0, 0, 0])


def outline(model: nn.Module, placed: Mapping[str, list[dict]] = MappingProxyType({})) -> dict[str, Any]:
    """The trace document. placed: by FQN, what parameters are placed on besides FSDP's dimensions."""
    names = class_names(model)
    by_fqn = parameters_of(model)
    parameters = _parameter_entries(by_fqn, placed)
    numbers = {name: i for i, entry in enumerate(parameters) for name in (entry["fqn"], *entry.get("shared_with", ()))}
    walk = _Walk(model, names, numbers)
    floating = [found.parameter.dtype for found in by_fqn.values() if found.parameter.dtype.is_floating_point]
    return {
        "schema": "shardplan.trace/1",
        "model": names[""],
        "source": "the module tree",
        "compute_dtype": dtype_name(floating[0]) if floating else "float32",
        "modules": module_entries(names, parameters),
        "parameters": parameters,
        "forwards": [{"name": "f0", "tensors": walk.tensors, "events": walk.forward}],
        "backwards": [{"name": "b0", "forwards": [0], "events": walk.backward}],
    }
