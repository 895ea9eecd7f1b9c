# SPDX-License-Identifier: Apache-2.0
"""Runs a case on the installed PyTorch, inside a process group, and gives the lines of its log."""

from __future__ import annotations

import runpy
import warnings

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardplan_conformance import checkpointing
from shardplan_conformance.case import Case, CaseError
from shardplan_conformance.meshes import device_mesh
from shardplan_conformance.program import Program, make_optimizer
from shardplan_conformance.trace_case import make_model
from shardplan_conformance.units import UnitCall, unit_calls


def forward_order(trace: dict, strategy: dict) -> list[str]:
    """FQNs of the modules in the order in which the program's first forward enters them. Both documents as the planner
    gets them."""
    names = [module["fqn"] for module in trace["modules"]]
    first = next(
        (call.get("trace", 0) for step in strategy["program"] for call in step if call["call"] == "forward"), 0
    )
    return [names[event[1]] for event in trace["forwards"][first]["events"] if event[0] == "enter"]


def record_case(case: Case, order: list[str]) -> list[str]:
    """The lines of this rank's log. `order`: see forward_order. The process group is there."""
    _refuse_what_is_not_applied(case.strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = case.strategy.get("policy", "fsdp2")
        if policy == "fsdp2":
            return _record_fsdp2(case, order)
        if policy == "fsdp1":
            return _record_fsdp1(case)
        raise CaseError(f'/policy: "{policy}" is not one of PyTorch\'s')


def _refuse_what_is_not_applied(strategy: dict) -> None:
    where = None
    if strategy.get("optimizer", {}).get("kind") == "adafactor" and strategy.get("policy", "fsdp2") == "fsdp2":
        where = "/optimizer/kind"  # DTensor refuses Adafactor's operations in place
    elif strategy.get("policy") == "fsdp1" and any(
        d["name"] not in ("shard", "replicate") for d in strategy.get("mesh", [])
    ):
        where = "/mesh"
    if where is not None:
        raise CaseError(f"{where}: not something that a recording can be made of yet")


def _record_fsdp2(case: Case, order: list[str]) -> list[str]:
    from shardplan_conformance.fsdp2_apply import AppliedFsdp2
    from shardplan_conformance.fsdp2_events import Fsdp2Events

    mesh = device_mesh(case.strategy, case.ranks)
    if case.apply:
        return _record_exported(case, mesh)
    model, calls, modules = _checkpointed(case, mesh)
    applied = AppliedFsdp2(calls, case.strategy, mesh, modules, order)
    log = Fsdp2Events(_names(modules))
    if case.strategy.get("optimizer", {}).get("in_backward"):
        log.steps_in_backward(model)
    optimizer = make_optimizer(case.strategy, model.parameters())
    with log.patches(), checkpointing.early_stop(case.strategy):
        Program(case, model, optimizer, log, applied.module_call, applied.optimizer_stepped).run()
    return log.lines


def _record_exported(case: Case, mesh: DeviceMesh) -> list[str]:
    """The file's own calls alone."""
    from shardplan_conformance.fsdp2_events import Fsdp2Events

    exported = runpy.run_path(str(case.apply))
    model = make_model(case)
    if case.parallelize is not None:
        case.parallelize(model, mesh)
    model = exported["apply_plan"](model, mesh)
    modules: dict[str, torch.nn.Module] = {}
    for name, module in checkpointing.named_modules(model).items():
        modules.setdefault(".".join(part for part in name.split(".") if part != "_checkpoint_wrapped_module"), module)
    log = Fsdp2Events(_names(modules))
    if case.strategy.get("optimizer", {}).get("in_backward"):
        log.steps_in_backward(model)
    optimizer = make_optimizer(case.strategy, model.parameters())
    stepped = exported.get("after_optimizer_step", lambda _model: None)
    with log.patches():
        Program(case, model, optimizer, log, lambda _call: None, lambda: stepped(model), exported).run()
    return log.lines


def _record_fsdp1(case: Case) -> list[str]:
    from shardplan_conformance.fsdp1_apply import AppliedFsdp1, runs_on_the_cpu
    from shardplan_conformance.fsdp1_events import Fsdp1Events

    mesh = device_mesh(case.strategy, case.ranks)
    _, calls, modules = _checkpointed(case, mesh)
    with runs_on_the_cpu():
        applied = AppliedFsdp1(calls, case.strategy, mesh, modules)
        log = Fsdp1Events(_names(modules))
        optimizer = make_optimizer(case.strategy, applied.root.parameters())
        log.steps_in_backward(applied.root)
        with log.patches(), checkpointing.early_stop(case.strategy):
            Program(case, applied.root, optimizer, log, applied.module_call).run()
    return log.lines


def _checkpointed(case: Case, mesh: DeviceMesh) -> tuple[torch.nn.Module, list[UnitCall], dict[str, torch.nn.Module]]:
    """The model with its checkpoint wrappers, the units to make of it, and its modules by the FQNs of the plain
    model."""
    plain = make_model(case)
    calls = unit_calls(plain, case.strategy)
    if case.parallelize is not None:
        case.parallelize(plain, mesh)
    model, modules = checkpointing.wrap(plain, case.strategy)
    return model, calls, modules


def _names(modules: dict[str, torch.nn.Module]) -> dict[torch.nn.Module, str]:
    """A module that is registered several times by its first name."""
    names: dict[torch.nn.Module, str] = {}
    for fqn, module in modules.items():
        names.setdefault(module, fqn)
    return names
