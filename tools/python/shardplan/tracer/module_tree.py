# SPDX-License-Identifier: Apache-2.0
"""The static part of a trace: modules, parameters, buffers; and the copy of a model onto fake CUDA tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from shardplan.tracer.local_tensors import local, placements, with_local
from shardplan.tracer.operators import dtype_name
from shardplan.tracer.spmd_annotations import annotated_placements


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _class_called(module: nn.Module, name: str) -> type | None:
    """The first class of that name in the tree, as accelerate's get_module_class_from_name finds it."""
    if type(module).__name__ == name:
        return type(module)
    return next((found for child in module.children() if (found := _class_called(child, name)) is not None), None)


def model_parts(root: nn.Module) -> dict[nn.Module, list[str]]:
    """The parts that a transformers model, or its wrapper, names for its modules (Module::parts in trace.h). Empty: the
    model says nothing."""
    if getattr(root, "_no_split_modules", None) is None and not hasattr(root, "get_input_embeddings"):
        return {}
    parts: dict[nn.Module, list[str]] = {}

    def mark(module: object, part: str) -> None:
        if isinstance(module, nn.Module):
            parts.setdefault(module, []).append(part)

    prefix = getattr(root, "base_model_prefix", "")
    mark(getattr(root, prefix, None) if prefix else root, "base_model")
    classes = tuple(
        c for name in getattr(root, "_no_split_modules", None) or () if (c := _class_called(root, name)) is not None
    )
    for module in root.modules():
        if classes and isinstance(module, classes):
            mark(module, "layer")
    for part in ("input_embeddings", "output_embeddings"):
        try:
            mark(getattr(root, f"get_{part}", lambda: None)(), part)
        except NotImplementedError:  # a model of images
            pass
    return parts


_GRADIENT_FIELDS = "_shardplan_gradient_fields"


def gradient_fields(parameter: torch.Tensor) -> dict:
    """Fields of a parameter's entry in a trace about its grad_dtype; none if it has none of its own."""
    kept = parameter.__dict__.get(_GRADIENT_FIELDS)
    if kept is not None:
        return kept
    grad_dtype = getattr(parameter, "grad_dtype", parameter.dtype)
    if not getattr(parameter, "_has_grad_dtype_override", grad_dtype != parameter.dtype):
        return {}
    if grad_dtype is None:
        return {"any_grad_dtype": True}
    return {"grad_dtype": dtype_name(grad_dtype)}


@dataclass
class ModuleTree:
    """`modules`, `parameters` and `buffers` are laid out as in the document."""

    modules: list[dict] = field(default_factory=list)
    parameters: list[dict] = field(default_factory=list)
    buffers: list[dict] = field(default_factory=list)
    module_ids: dict[nn.Module, int] = field(
        default_factory=dict
    )  # the first place of a module registered several times
    parameter_ids: dict[torch.Tensor, int] = field(default_factory=dict)
    buffer_tensors: list[torch.Tensor] = field(default_factory=list)
    # Modules that run as compiled graphs -> names of their backends.
    compiled: dict[nn.Module, str] = field(default_factory=dict)
    parts: dict[nn.Module, list[str]] = field(default_factory=dict)  # what the model says that they are

    @staticmethod
    def of(root: nn.Module, compiled: dict[nn.Module, str] | None = None) -> "ModuleTree":
        tree = ModuleTree(compiled=compiled or {}, parts=model_parts(root))
        tree._add_parameters(root)
        tree._add_module(root, "")
        return tree

    def _add_parameters(self, root: nn.Module) -> None:
        annotated = annotated_placements(dict(root.named_parameters()))
        for fqn, parameter in root.named_parameters(remove_duplicate=False):
            if parameter in self.parameter_ids:
                self.parameters[self.parameter_ids[parameter]].setdefault("shared_with", []).append(fqn)
                continue
            self.parameter_ids[parameter] = len(self.parameters)
            entry = {"fqn": fqn, "shape": list(local(parameter).shape), "dtype": dtype_name(parameter.dtype)}
            if not parameter.requires_grad:
                entry["requires_grad"] = False
            entry.update(gradient_fields(parameter))
            if placed := placements(parameter) or annotated.get(fqn):
                entry["placements"] = placed
            self.parameters.append(entry)

    def _add_module(self, module: nn.Module, fqn: str) -> None:
        entry: dict = {"fqn": fqn, "class_name": type(module).__name__}
        children = [name for name, child in module._modules.items() if child is not None]
        if children:
            entry["children"] = children
        parameters = [(name, p) for name, p in module._parameters.items() if p is not None]
        if parameters:
            entry["parameters"] = [{"name": name, "parameter": self.parameter_ids[p]} for name, p in parameters]
        buffers = [(name, b) for name, b in module._buffers.items() if b is not None]
        if buffers:
            entry["buffers"] = [name for name, _ in buffers]
        first = self.module_ids.get(module)
        if first is not None:
            entry["same_module_as"] = self.modules[first]["fqn"]
        if module in self.compiled:
            entry["compiled"] = self.compiled[module]
        if first is None:
            self.module_ids[module] = len(self.modules)
            if parts := self.parts.get(module):
                entry["parts"] = parts
            for name, buffer in buffers:
                self._add_buffer(module, _join(fqn, name), name, buffer)
        self.modules.append(entry)
        for name in children:
            self._add_module(module._modules[name], _join(fqn, name))

    def _add_buffer(self, module: nn.Module, fqn: str, name: str, buffer: torch.Tensor) -> None:
        entry = {"fqn": fqn, "shape": list(buffer.shape), "dtype": dtype_name(buffer.dtype)}
        if name in module._non_persistent_buffers_set:
            entry["persistent"] = False
        self.buffers.append(entry)
        self.buffer_tensors.append(buffer)


def on_fake_cuda(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A fake CUDA tensor of the same shape and strides, or a distributed one of such a part. Call inside
    FakeTensorMode."""
    part = local(tensor)
    return with_local(tensor, torch.empty_strided(part.shape, part.stride(), dtype=dtype or part.dtype, device="cuda"))


def move_to_fake_cuda(root: nn.Module, parameter_dtype: torch.dtype | None) -> None:
    """Replaces every parameter, buffer and plain tensor attribute by a fake CUDA one; floating parameters take
    `parameter_dtype` (None: their own). Ties stay ties. Buffers keep their dtype: mixed precision casts parameters
    only. Call inside FakeTensorMode.
    """
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                dtype = parameter_dtype if parameter.dtype.is_floating_point else None
                data = on_fake_cuda(parameter, dtype)
                made[parameter] = nn.Parameter(data, requires_grad=parameter.requires_grad)
                made[parameter].__dict__[_GRADIENT_FIELDS] = gradient_fields(parameter)
                if hasattr(parameter, "grad_dtype") and parameter.requires_grad:
                    made[parameter].grad_dtype = None  # a trace shows gradients as autograd makes them
                for key, value in parameter.__dict__.items():  # but what a fake tensor says of its own device
                    made[parameter].__dict__.setdefault(key, value)
            module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _moved(buffer, made)
        for name, value in module.__dict__.items():
            if isinstance(value, torch.Tensor):
                module.__dict__[name] = _moved(value, made)
        if isinstance(module, nn.RNNBase):  # it keeps a list of its parameters
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def _moved(tensor: torch.Tensor, made: dict) -> torch.Tensor:
    if tensor not in made:
        made[tensor] = on_fake_cuda(tensor)
    return made[tensor]
