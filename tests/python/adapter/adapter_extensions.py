# SPDX-License-Identifier: Apache-2.0
"""Functions that run on the ranks in test_adapter_extensions.py, by a plan next to real FSDP2: parameters that are
tensor subclasses with an all-gather extension, and units whose parameters differ in dtype."""

from __future__ import annotations

import math
import traceback
import warnings

import torch
import torch.nn as nn
from equivalence import (
    Case,
    Fsdp2Calls,
    PlanCalls,
    Trainer,
    compare_training,
    largest_difference,
    make_mesh,
    make_model,
    whole,
    with_fsdp2,
    with_plan,
)
from equivalence_settings import END, case, micro
from torch.utils import _pytree as pytree

aten = torch.ops.aten
KEEPS = {
    aten.clone.default,
    aten.detach.default,
    aten.new_zeros.default,
    aten.view.default,
    aten.as_strided.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.narrow.default,
    aten._to_copy.default,
}


class Wrapper(torch.Tensor):
    """A plain tensor inside; operations run on that."""

    @staticmethod
    def __new__(cls, data: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._data})"

    def __tensor_flatten__(self):
        return ["_data"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _flatten_spec, _size, _stride):
        return cls(inner["_data"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = pytree.tree_map_only(Wrapper, lambda x: x._data, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        return pytree.tree_map_only(torch.Tensor, cls, out) if func in KEEPS else out

    def padded(self, outer_size: torch.Size, ranks: int) -> torch.Tensor:
        rows = math.ceil(outer_size[0] / ranks)
        if self._data.shape[0] == rows:
            return self._data
        out = self._data.new_zeros((rows, *self._data.shape[1:]))
        out[: self._data.shape[0]].copy_(self._data)
        return out


class Bfloat16(Wrapper):
    """Gathered in bfloat16, computed in the original dtype: post-all-gather makes a tensor."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.padded(outer_size, mesh.size()).to(torch.bfloat16),), outer_size

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (gathered,) = outputs
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(gathered[: metadata[0]])
            return None
        made = gathered[: metadata[0]].to(param_dtype)
        return made, (gathered, made)


class Float8(Wrapper):
    """float8 with a scale of each rank beside it."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        own = self.padded(outer_size, mesh.size())
        scale = own.abs().max().clamp_min(1e-6).float() / 448.0
        return ((own / scale).to(torch.float8_e4m3fn), scale.view(1)), outer_size

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        numbers, scales = outputs
        rows = numbers.shape[0] // scales.numel()
        made = (numbers.to(param_dtype) * scales.repeat_interleave(rows)[:, None].to(param_dtype))[: metadata[0]]
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(made)
            return None
        made = made.clone()
        return made, (made,)


class AsItIs(Wrapper):
    """Gathers itself, and is what was gathered."""

    def fsdp_pre_all_gather(self, mesh):
        return (self._data,), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (gathered,) = outputs
        return None if out is not None else (gathered, ())


WEIGHTS = ["layers.*.up.weight", "layers.*.down.weight"]


def extension(gathered: list[dict], unsharded: list[dict], **more) -> dict:
    rule = {"parameters": WEIGHTS, "gathered": gathered, "unsharded": unsharded}
    return {"fsdp2": {"extensions": [rule]}, "optimizer": "sgd", "steps": 4, **more}


def wide(name: str, **fields) -> Case:
    return case(name, arguments={"width": 8, "hidden": 12}, **fields)


BFLOAT16 = ([{"dtype": "bfloat16"}], [{"dtype": "float32"}])
FLOAT8 = ([{"dtype": "float8_e4m3fn"}, {"dtype": "float32", "numel": 1}], [{"dtype": "float32"}])
HALF = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
# The class of the weights, or the dtype of the frozen norms.
EXTENDED: list[tuple[Case, type]] = [
    (wide("bfloat16", **extension(*BFLOAT16)), Bfloat16),
    (case("bfloat16_uneven", **extension(*BFLOAT16)), Bfloat16),
    (wide("bfloat16_kept", reshard_after_forward=False, **extension(*BFLOAT16)), Bfloat16),
    (wide("bfloat16_accumulate", program=[[*micro(0), *micro(1), *END]], **extension(*BFLOAT16)), Bfloat16),
    (wide("float8", **extension(*FLOAT8)), Float8),
    (
        wide("float8_mixed", mixed_precision=HALF, **extension(FLOAT8[0], [{"dtype": "bfloat16"}])),
        Float8,
    ),
    (wide("as_it_is", **extension([{"dtype": "float32"}], [])), AsItIs),
]
MIXED = [
    case("mixed_dtypes", arguments={"frozen": ["layers.0.norm", "layers.1.up", "stem"]}, steps=4),
    case(
        "mixed_dtypes_accumulate",
        arguments={"frozen": ["layers.2.norm", "layers.1.norm"]},
        program=[[*micro(0), *micro(1), *END]],
        steps=4,
    ),
]
CASES = [c for c, _ in EXTENDED] + MIXED


def extend(model: nn.Module, of: type) -> nn.Module:
    for layer in model.layers:
        for linear in (layer.up, layer.down):
            linear.weight = nn.Parameter(of(linear.weight.detach().clone()))
    return model


def in_double(model: nn.Module) -> nn.Module:
    """Frozen parts in float64: units of two dtypes."""
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and not any(p.requires_grad for p in own):
            module.double()
            module.register_forward_pre_hook(lambda _m, args: tuple(a.double() for a in args))
            module.register_forward_hook(lambda _m, _args, output: output.float())
    return model


def inner(tensor: torch.Tensor) -> torch.Tensor:
    """The plain local tensor of a parameter."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local._data if isinstance(local, Wrapper) else local


class PlainTrainer(Trainer):
    """Notes the plain tensors inside of the parameters."""

    def optimizer_step(self, number: int, place: str, call: dict, seen: dict) -> None:
        self.optimizer.step()
        for name, parameter in self.model.named_parameters():
            seen[f"{place}: {name}"] = inner(parameter.detach()).clone()


def compare(of: Case, prepare, plan: str) -> tuple[float, str]:
    mesh = make_mesh(of)
    ours = with_plan(of, prepare(make_model(of)), mesh, plan)
    theirs = with_fsdp2(of, prepare(make_model(of)), mesh)
    trainers = PlainTrainer(of, ours, PlanCalls(ours)), PlainTrainer(of, theirs, Fsdp2Calls(theirs))
    return compare_training(of, *trainers, lambda model: {n: inner(p.detach()) for n, p in model.named_parameters()})


def refusals(plan: str) -> list[str]:
    """The messages of apply and of a forward."""
    import shardplan.torch as sp

    said = []
    for model in (make_model(CASES[0]), extend(make_model(CASES[0]), Float8)):
        try:
            sp.apply(model, plan)(torch.zeros(2, 7))
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    return said


def beside_the_plan(of: Case, prepare, plan: str) -> tuple[float, str]:
    """Evaluation between steps, and steps that leave the plan, with other parts of the model from some step on."""
    import shardplan.torch as sp

    mesh = make_mesh(of)
    ours = sp.apply(prepare(make_model(of)), plan, mesh, on_deviation="replan")
    theirs = with_fsdp2(of, prepare(make_model(of)), mesh)
    trainers = PlainTrainer(of, ours, PlanCalls(ours)), PlainTrainer(of, theirs, Fsdp2Calls(theirs))
    worst = (0.0, "")
    for step in range(5):
        seen = []
        for trainer in trainers:
            trainer.model.unused = (1,) if 2 <= step < 4 else ()
            with torch.no_grad():
                before = trainer.model(torch.full((2, 7), 0.5))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                seen.append({"evaluation": before, **trainer.step(step)})
        worst = max(worst, largest_difference(*seen))
    return worst


def run_all(plans: dict[str, str]) -> dict[str, object]:
    prepared = {c.name: (c, lambda model, of=of: extend(model, of)) for c, of in EXTENDED}
    prepared |= {c.name: (c, in_double) for c in MIXED}
    results: dict[str, object] = {}
    for name, (of, prepare) in prepared.items():
        try:
            results[name] = compare(of, prepare, plans[name])
        except Exception as error:
            results[name] = (float("inf"), f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    for name in ("bfloat16_uneven", "float8"):
        try:
            results[f"{name} beside the plan"] = beside_the_plan(*prepared[name], plans[name])
        except Exception as error:
            results[f"{name} beside the plan"] = (float("inf"), f"{error}\n{traceback.format_exc()}")
    results["refusals"] = refusals(plans[CASES[0].name])
    return results
