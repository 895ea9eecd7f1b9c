# SPDX-License-Identifier: Apache-2.0
"""Records cases in the form of tests/conformance/fsdp1 and fsdp2: the plain model as JSON, and what PyTorch logs.

Each case has one forward, and steps of a forward, a backward, an optimizer step and zero_grad.

    PYTHONPATH=tools/python:tests/python:tests/python/conformance python -m reference_recorder MODULE:FUNCTION FOLDER
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shardplan import files
from shardplan.tracer.record import default_loss
from shardplan_conformance import Case, checkpointing
from shardplan_conformance.case import load_cases
from shardplan_conformance.ranks import Ranks
from shardplan_conformance.trace_case import make_model
from shardplan_conformance.units import matching, unit_calls

sys.path.append(str(Path(__file__).resolve().parents[1]))
from inputs_done import InputsDone  # noqa: E402

_ROOT = "(root)"
_SHARDING = {"hybrid_shard_zero2": "_HYBRID_SHARD_ZERO2"}


# ---- fsdp1 ----


class PlainTrace:
    """One forward and backward of the plain model. Tensors have the number of the object; units' tensors are hooked
    once in each call."""

    def __init__(self, model: nn.Module, units: set[str]):
        self.forward: list[dict] = []
        self.backward: list[dict] = []
        self._in_backward = False
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # an object's id is its own as long as it lives
        for fqn, module in model.named_modules():
            hooks = functools.partial(self._enter, fqn), functools.partial(self._exit, fqn)
            if fqn not in units:
                hooks = functools.partial(self._plain, "enter", fqn), functools.partial(self._plain, "exit", fqn)
            module.register_forward_pre_hook(hooks[0], with_kwargs=True)
            module.register_forward_hook(hooks[1])
        for fqn, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(functools.partial(self._param_grad, fqn))

    def begin_backward(self) -> None:
        """Modules that run from here on run again: a trace says nothing of that."""
        self._in_backward = True

    def _plain(self, kind: str, fqn: str, *_) -> None:
        self._call({"ev": kind, "module": fqn or _ROOT})

    def _enter(self, fqn: str, _module, args, kwargs) -> None:
        self._call({"ev": "enter", "module": fqn or _ROOT}, "inputs", (args, kwargs))

    def _exit(self, fqn: str, _module, _args, output) -> None:
        self._call({"ev": "exit", "module": fqn or _ROOT}, "outputs", output)

    def _call(self, event: dict, what: str = "", tree=None) -> None:
        if self._in_backward:
            return
        if what:
            event[what] = self._tensors(tree, what.replace("puts", "put_grad"), event["module"])
        self.forward.append(event)

    def _param_grad(self, fqn: str, _parameter) -> None:
        self.backward.append({"ev": "param_grad", "param": fqn})

    def _tensors(self, tree, kind: str, name: str) -> list[dict]:
        found: list[dict] = []
        for tensor in tree_leaves(tree):
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                continue
            if id(tensor) not in self._numbers:
                self._numbers[id(tensor)] = len(self._kept)
                self._kept.append(tensor)
            number = self._numbers[id(tensor)]
            found.append({"tensor": number, "shape": list(tensor.shape), "requires_grad": tensor.requires_grad})
            if tensor.requires_grad:
                event = {"ev": kind, "module": name, "tensor": number}
                tensor.register_hook(lambda _grad, event=event: self.backward.append(event))
        return found


def _checkpointed(case: Case, model: nn.Module) -> list[str]:
    entries = (case.strategy.get("checkpoint") or {}).get("modules", [])
    return [fqn for entry in entries for fqn in matching(model, entry)]


def _step_of(case: Case, model: nn.Module, between=lambda: None) -> None:
    """A forward and a backward of the case."""
    forward = case.forwards[0]
    with checkpointing.early_stop(case.strategy):
        loss = (case.loss or default_loss)(model(*forward.args, **forward.kwargs))
        between()
        loss.backward()


def fsdp1_document(case: Case) -> dict:
    model = make_model(case)
    owned = {id(p): fqn for fqn, p in model.named_parameters()}
    every = list(model.named_parameters(remove_duplicate=False))
    modules = [
        {
            "fqn": fqn or _ROOT,
            "class": type(module).__name__,
            "children": [name for name, _ in module.named_children()],
            "params": [
                name
                for name, p in module.named_parameters(recurse=False)
                if owned[id(p)] == (f"{fqn}.{name}" if fqn else name)
            ],
        }
        for fqn, module in model.named_modules()
    ]
    parameters = [
        {
            "fqn": fqn, "shape": list(p.shape), "dtype": str(p.dtype).removeprefix("torch."),
            "requires_grad": p.requires_grad,
        }
        for fqn, p in model.named_parameters()
    ]
    shared = [{"fqn": fqn, "shares": owned[id(p)]} for fqn, p in every if owned[id(p)] != fqn]
    names = [fqn for call in unit_calls(model, case.strategy) for fqn in call.modules]
    checkpointed = _checkpointed(case, model)
    trace = PlainTrace(model, set(names))
    _step_of(case, model, trace.begin_backward)
    ordered = sorted(names, key=[fqn for fqn, _ in model.named_modules()].index)
    return {
        "case": case.name,
        "model": type(model).__name__,
        "torch": torch.__version__,
        "world_size": case.ranks,
        "mesh": {"shape": [case.ranks], "dims": ["shard"]},
        "settings": _settings(case.strategy),
        "units": [{"fqn": fqn or _ROOT, "checkpointed": fqn in checkpointed} for fqn in ordered],
        "model_description": {"modules": modules, "parameters": parameters, "shared_parameters": shared},
        "steps": [_step() for _ in range(case.step_count())],
        "forward_traces": [trace.forward],
        "backward_traces": [trace.backward],
    }


def _settings(strategy: dict) -> dict:
    knobs = {
        "sharding": "full_shard", "backward_prefetch": "backward_pre", "limit_all_gathers": True,
        **strategy.get("fsdp1", {}),
    }
    prefetch = knobs["backward_prefetch"]
    return {
        "strategy": _SHARDING.get(knobs["sharding"], knobs["sharding"].upper()),
        "backward_prefetch": None if prefetch == "none" else prefetch.upper(),
        "forward_prefetch": knobs.get("forward_prefetch", False),
        "limit_all_gathers": knobs["limit_all_gathers"],
        "mixed_precision": None,
        "use_orig_params": knobs.get("use_orig_params", False),
        "cpu_offload": False,
        "activation_checkpointing": "fsdp(ckpt(unit))" if strategy.get("checkpoint") else None,
        "ignored_modules": [],
        "optim_in_backward": False,
    }


def _step() -> list[dict]:
    forward = {"call": "forward", "mode": "train", "mb": 0, "forward_trace": 0}
    return [forward, {"call": "backward", "mb": 0, "backward_trace": 0}, {"call": "optim_step"}, {"call": "zero_grad"}]


# ---- fsdp2 ----


class Calls:
    """The calls of modules in a forward, with all their tensors. An object's number is its own."""

    def __init__(self, model: nn.Module):
        self.tensors: list[dict] = []
        self.events: list[dict] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        for fqn, module in model.named_modules():
            module.register_forward_pre_hook(functools.partial(self._enter, fqn), with_kwargs=True)
            module.register_forward_hook(functools.partial(self._exit, fqn))

    def _enter(self, fqn: str, _module, args, kwargs) -> None:
        self.events.append({"enter": fqn, "in": self._ids((args, kwargs))})

    def _exit(self, fqn: str, _module, _args, output) -> None:
        self.events.append({"exit": fqn, "out": self._ids(output)})

    def _ids(self, tree) -> list[int]:
        return [self._id(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

    def _id(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._kept)
            self._kept.append(tensor)
            described = {"shape": list(tensor.shape), "dtype": _dtype(tensor), "requires_grad": tensor.requires_grad}
            self.tensors.append({"id": self._numbers[id(tensor)], **described})
        return self._numbers[id(tensor)]


class Moments:
    """The moments that the units pass in a backward."""

    def __init__(self, model: nn.Module, units: list[str]):
        self.events: list[list] = []
        self._in_backward = False
        for fqn in units:
            module = model.get_submodule(fqn)
            module.register_forward_pre_hook(functools.partial(self._enter, fqn), with_kwargs=True)
            module.register_forward_hook(functools.partial(self._exit, fqn))

    def begin_backward(self) -> None:
        self._in_backward = True

    def _enter(self, fqn: str, _module, args, kwargs):
        if self._in_backward:
            self.events.append(["recompute_enter", fqn])
        leaves, spec = tree_flatten((args, kwargs))
        chosen = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not chosen or not torch.is_grad_enabled():
            return None
        wrapped = InputsDone.apply(lambda: self.events.append(["inputs_grad_done", fqn]), *(leaves[i] for i in chosen))
        for i, leaf in zip(chosen, wrapped):
            leaves[i] = leaf
        return tree_unflatten(leaves, spec)

    def _exit(self, fqn: str, _module, _args, output) -> None:
        if self._in_backward:
            self.events.append(["recompute_exit", fqn])
            return
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        for index, tensor in enumerate(tensors):
            if tensor.requires_grad:
                event = [f"output_grad_ready:{index}", fqn]
                tensor.register_hook(lambda _grad, event=event: self.events.append(event))


def fsdp2_document(case: Case) -> dict:
    model = make_model(case)
    calls = unit_calls(model, case.strategy)
    forward = Calls(model)
    with torch.enable_grad():
        model(*case.forwards[0].args, **case.forwards[0].kwargs)
    plain = make_model(case)
    moments = Moments(checkpointing.wrap(plain, case.strategy)[0], [fqn for call in calls for fqn in call.modules])
    _step_of(case, plain, moments.begin_backward)
    names: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
    modules = [
        {
            "fqn": fqn,
            "class": type(module).__name__,
            "children": [name for name, _ in module.named_children()],
            "params": [{"name": name, "param": names[id(p)][0]} for name, p in module.named_parameters(recurse=False)],
        }
        for fqn, module in model.named_modules()
    ]
    parameters = [
        {
            "fqn": fqn, "shape": list(p.shape), "dtype": _dtype(p), "requires_grad": p.requires_grad,
            "shared_with": names[id(p)][1:],
        }
        for fqn, p in model.named_parameters()
    ]
    steps = range(case.step_count())
    return {
        "format": "fsdp2-case-1",
        "name": case.name,
        "torch": torch.__version__,
        "model": type(model).__name__,
        "world_size": case.ranks,
        "mesh": {"shape": [case.ranks], "dims": ["shard"]},
        "checkpoint": {"checkpoint_wrapper_on": _checkpointed(case, model)},
        "fully_shard_calls": [
            {"modules": call.modules, "reshard_after_forward": None, "mp_policy": None, "cpu_offload": False}
            for call in calls
        ],
        "setup": [],
        "program": [
            [{"op": "forward", "mb": 0}, {"op": "backward", "mbs": [0]}, {"op": "optim_step"}, {"op": "zero_grad"}]
            for _ in steps
        ],
        "modules": modules,
        "parameters": parameters,
        "forward_traces": {"f0": {"tensors": forward.tensors, "events": forward.events}},
        "forward_of": [{"step": step, "op": "forward", "mb": 0, "trace": "f0"} for step in steps],
        "backward_traces": {"b0": moments.events},
        "backward_of": [{"step": step, "mbs": [0], "trace": "b0"} for step in steps],
    }


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# ---- files ----


def document(case: Case) -> dict:
    return fsdp1_document(case) if case.strategy["policy"] == "fsdp1" else fsdp2_document(case)


def write(make_case, lines: list[str], folder: Path) -> None:
    case = make_case()
    parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in document(case).items()]
    files.write_text(folder / f"{case.name}.json", "{" + ",\n".join(parts) + "}\n")
    head = [f"# case {case.name}", f"# torch {torch.__version__}", f"# ranks {case.ranks}"]
    files.write_text(folder / f"{case.name}.log", "\n".join([*head, *lines]) + "\n")


def _one(source: str, index: int) -> Case:
    return load_cases(source)[index]


def main(source: str, folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for index, case in enumerate(load_cases(source)):
        make = functools.partial(_one, source, index)
        order = [fqn for fqn, _ in case.model().named_modules()]
        with Ranks(case.ranks) as ranks:
            write(make, ranks.record(make, order), Path(folder))
        print(case.name)


if __name__ == "__main__":
    main(*sys.argv[1:])
