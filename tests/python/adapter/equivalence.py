# SPDX-License-Identifier: Apache-2.0
"""Training by a plan next to real FSDP2: the same model, ranks, seeds and strategy, step by step.

A Case is a model and a strategy document. The strategy is read twice: by `shardplan plan`, whose plan the adapter
replays, and by `with_fsdp2` below, which makes the calls of PyTorch that the document stands for. Both then run the
strategy's program for some steps; after every backward the losses and gradients, after every optimizer step the
parameters are compared bit for bit, on every rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import traceback
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from adapter_workers import DEVICE, run_on_ranks
from equivalence_models import build, inputs_of, loss_of, register_forward_methods
from torch.utils._pytree import tree_map_only

FEW_STEPS = 3  # the first, and two by the steady plan
# More, but for the smallest model: tools/nightly --only adapter_files.
STEPS = int(os.environ.get("SHARDPLAN_STEPS", FEW_STEPS))
DEFAULT_PROGRAM = [[{"call": "forward"}, {"call": "backward"}, {"call": "optimizer_step"}, {"call": "zero_grad"}]]


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    model: str = "mlp"
    arguments: dict = dataclasses.field(default_factory=dict)  # of the model's constructor
    strategy: dict = dataclasses.field(default_factory=dict)  # without "schema" and "policy"
    ranks: int = 2
    # The passes that are traced: forwards (with gradients or not) in groups, each with one backward of its summed
    # losses. A call's `trace` is the number of the forward or of the backward.
    groups: tuple[tuple[bool, ...], ...] = ((True,),)
    checkpoint: tuple[str, ...] = ()  # modules wrapped in checkpoint_wrapper by the user, innermost first
    optimizer: str = "adamw"
    clip: float | None = None  # clip_grad_norm_
    steps: int = STEPS
    tolerance: float = 0.0  # relative; 0: bit for bit

    @property
    def mesh(self) -> list[dict]:
        return self.strategy.get("mesh") or [{"name": "shard", "size": self.ranks}]


def matches(entry: str, fqn: str, module: nn.Module) -> bool:
    """A unit rule's entry against a module (docs/reference/strategy-format.md)."""
    if entry.startswith("class:"):
        return type(unwrapped(module)).__name__ == entry.removeprefix("class:")
    pattern = "".join({"*": "[^.]*", "?": "[^.]"}.get(character, re.escape(character)) for character in entry)
    return re.fullmatch(pattern, fqn) is not None


def unwrapped(module: nn.Module) -> nn.Module:
    return getattr(module, "_checkpoint_wrapped_module", module)


def modules_named(model: nn.Module, entry: str) -> list[nn.Module]:
    """In module tree order; of a wrapped module the wrapper."""
    found, seen = [], set()
    for name, module in model.named_modules():
        fqn = ".".join(part for part in name.split(".") if part != "_checkpoint_wrapped_module")
        if fqn not in seen and matches(entry, fqn, module):
            found.append(module)
        seen.add(fqn)
    return found


def wrap_checkpoints(case: Case, model: nn.Module) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for entry in case.checkpoint:
        targets = set(modules_named(model, entry))
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if child in targets and not hasattr(child, "_checkpoint_wrapped_module"):
                    parent.register_module(name, checkpoint_wrapper(child))


def make_model(case: Case) -> nn.Module:
    model = build(case.model, case.arguments).to(DEVICE)
    wrap_checkpoints(case, model)
    return model


def make_mesh(case: Case):
    dims = case.mesh
    return dist.device_mesh.init_device_mesh(
        DEVICE, tuple(d["size"] for d in dims), mesh_dim_names=tuple(d["name"] for d in dims)
    )


# ---- real FSDP2 by a strategy document ----


def _dtype(name: str | None) -> torch.dtype | None:
    return name and getattr(torch, name)


def _precision(fields: dict | None):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    fields = dict(fields or {})
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        fields[name] = _dtype(fields.get(name))
    return MixedPrecisionPolicy(**fields)


def _options(case: Case, rule: dict, model: nn.Module) -> dict:
    from torch.distributed.fsdp import CPUOffloadPolicy

    def knob(name: str):
        return rule[name] if name in rule else case.strategy.get(name)

    options = {"mp_policy": _precision(knob("mixed_precision"))}
    if knob("reshard_after_forward") is not None:
        options["reshard_after_forward"] = knob("reshard_after_forward")
    if knob("cpu_offload"):
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if ignored := case.strategy.get("ignored_parameters"):
        by_name = dict(model.named_parameters(remove_duplicate=False))
        options["ignored_params"] = {by_name[fqn] for fqn in ignored}
    return options


def _set_knobs(case: Case, model: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    knobs = case.strategy.get("fsdp2", {})
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        if (factor := knobs.get("gradient_divide_factor")) is not None:
            unit.set_gradient_divide_factor(factor)
        if knobs.get("force_sum_reduction"):
            unit.set_force_sum_reduction_for_comms(True)
    if knobs.get("unshard_async_op"):
        model._set_unshard_async_op(True)
    inner = [unit for unit in units if unit is not model]
    for index, unit in enumerate(inner):
        if distance := knobs.get("forward_prefetch", 0):
            unit.set_modules_to_forward_prefetch(inner[index + 1 : index + 1 + distance])
        if (distance := knobs.get("backward_prefetch", -1)) > 0:
            unit.set_modules_to_backward_prefetch(inner[max(0, index - distance) : index][::-1])
    for direction in ("forward", "backward"):
        for entry in knobs.get(f"{direction}_prefetch_lists", []):
            (unit,) = modules_named(model, entry["unit"])
            targets = [modules_named(model, fqn)[0] for fqn in entry["prefetch"]]
            getattr(unit, f"set_modules_to_{direction}_prefetch")(targets)


def fsdp_mesh(case: Case, rule: dict, mesh):
    """The mesh that a user gives fully_shard: the dimensions that data_parallel names."""
    named = rule.get("data_parallel") or case.strategy.get("data_parallel")
    if named is None:
        return mesh
    kinds = [dims for dims in (named.get("replicate"), named.get("shard")) if dims]
    parts = [mesh[tuple(dims)]._flatten(f"flat_{'_'.join(dims)}") if len(dims) > 1 else mesh[dims[0]] for dims in kinds]
    if len(parts) == 1:
        return parts[0]
    with warnings.catch_warnings():  # of slicing by a flattened dimension
        warnings.simplefilter("ignore")
        return mesh[tuple(part.mesh_dim_names[0] for part in parts)]


def with_fsdp2(case: Case, model: nn.Module, mesh, port=None) -> nn.Module:
    """fully_shard for every unit of the strategy, and its knobs. port: shardplan.torch, whose functions take the places
    of PyTorch's."""
    from shardplan_conformance.installed_fsdp import mesh_info, placed_on
    from shardplan_conformance.units import matches_any
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    if port is not None:
        fully_shard, register_fsdp_forward_method = port.unit, port.register_forward_method  # noqa: F811
        register_forward_methods(model, register_fsdp_forward_method)

    def placements(rule: dict, model: nn.Module, mesh) -> dict:
        """Parameters on a mesh of their own."""
        if "parameter_meshes" not in rule:
            return {}
        (placed,) = rule["parameter_meshes"]
        info = mesh_info(fsdp_mesh(case, placed, mesh))
        on_it = {p for name, p in model.named_parameters() if matches_any(placed["parameters"], name)}
        return {"shard_placement_fn": lambda p: placed_on(info, None) if p in on_it else None}

    def wrap(target, rule: dict) -> None:
        own = rule.get("data_parallel") or case.strategy.get("data_parallel") or {"shard": True}
        call = fully_shard if own.get("shard") else replicate
        call(target, mesh=fsdp_mesh(case, rule, mesh), **_options(case, rule, model), **placements(rule, model, mesh))

    for rule in case.strategy["units"]:
        found = [module for entry in rule["modules"] for module in modules_named(model, entry)]
        for target in [found] if rule.get("group") else found:
            wrap(target, rule)
    if not isinstance(model, FSDPModule) and not any("" in rule["modules"] for rule in case.strategy["units"]):
        wrap(model, {})
    if port is not None:
        port.auto(model, quiet=True, optimizer=case.optimizer)
    else:
        register_forward_methods(model, register_fsdp_forward_method)
    _set_knobs(case, model)
    for call in case.strategy.get("setup", []):
        Fsdp2Calls(model)(call)
    return model


class Fsdp2Calls:
    """The `module` calls of a program, made on FSDP2's modules."""

    NOT_RECURSIVE = (
        "set_manual_backward_finalization", "set_is_last_backward", "set_unshard_in_backward",
        "set_force_sum_reduction_for_comms",
    )

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, call: dict) -> None:
        (module,) = modules_named(self.model, call.get("module", ""))
        method = getattr(module, call["method"], None)  # wait_for_gradient_reduction is the handle's
        if call["method"] == "unshard":
            method(async_op=call.get("value", False))
        elif call["method"] == "reshard":
            method()
        elif call["method"] == "finalize_backward":
            self.reduction = method(async_op=call.get("value", False))
        elif call["method"] == "wait_for_gradient_reduction":
            self.reduction.wait()
        elif call["method"] in self.NOT_RECURSIVE:
            method(call["value"])
        else:
            method(call["value"], recurse=call.get("recurse", True))


# ---- the same by a plan ----


def with_plan(case: Case, model: nn.Module, mesh, plan: str) -> nn.Module:
    import shardplan.torch as sp

    register_forward_methods(model, sp.register_forward_method)
    parameters = len(list(model.parameters()))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sp.apply(model, plan, mesh)
    warned = any("are tied, in several units: each unit trains a copy" in str(warning.message) for warning in said)
    assert warned == (len(list(model.parameters())) > parameters), [str(warning.message) for warning in said]
    return model


class PlanCalls:
    """Setters are in the plan; unshard and reshard are made where the program has them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, call: dict) -> None:
        import shardplan.torch as sp

        (module,) = modules_named(self.model, call.get("module", ""))
        if call["method"] == "unshard":
            sp.unshard(module, async_op=call.get("value", False))
        elif call["method"] == "reshard":
            sp.reshard(module)
        elif call["method"] == "finalize_backward":
            self.reduction = sp.finalize_backward(module, async_op=call.get("value", False))
        elif call["method"] == "wait_for_gradient_reduction":
            self.reduction.wait()


# ---- a training loop ----


class Trainer:
    """Runs the program and notes what there is to compare."""

    def __init__(self, case: Case, model: nn.Module, calls) -> None:
        self.case, self.model, self.calls = case, model, calls
        parameters = [p for p in model.parameters() if p.requires_grad]
        # On CUDA torch takes the kernels for many tensors where no parameter is a DTensor: other roundings.
        if case.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=False)
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)
        self.losses: dict[int, torch.Tensor] = {}

    def step(self, number: int) -> dict[str, torch.Tensor]:
        program = self.program()
        seen: dict[str, torch.Tensor] = {}
        for index, call in enumerate(program[min(number, len(program) - 1)]):
            getattr(self, call["call"])(number, f"call {index}", call, seen)
        return seen

    def program(self) -> list[list[dict]]:
        return self.case.strategy.get("program") or DEFAULT_PROGRAM

    def has_grad(self, call: dict) -> bool:
        """Whether a forward records gradients."""
        return [grad for group in self.case.groups for grad in group][call.get("trace", 0)]

    def rank(self) -> int:
        """Ranks with the same number see the same batch."""
        return dist.get_rank()

    def forward(self, number: int, place: str, call: dict, seen: dict) -> None:
        microbatch = call.get("microbatch", 0)
        made = inputs_of(self.case.model, 10_000 * number + 100 * microbatch + self.rank())
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(DEVICE), made)
        with contextlib.nullcontext() if self.has_grad(call) else torch.no_grad():
            loss = loss_of(self.model(*args, **kwargs))
        seen[f"{place}: loss"] = loss.detach().clone()
        self.losses[microbatch] = loss

    def backward(self, number: int, place: str, call: dict, seen: dict) -> None:
        losses = [self.losses.pop(microbatch) for microbatch in call.get("microbatches", [0])]
        sum(losses[1:], losses[0]).backward()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                seen[f"{place}: gradient of {name}"] = local(parameter.grad).clone()

    def optimizer_step(self, number: int, place: str, call: dict, seen: dict) -> None:
        if self.case.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.case.clip)
            seen[f"{place}: gradient norm"] = whole(norm)
        self.optimizer.step()
        for name, parameter in self.model.named_parameters():
            seen[f"{place}: {name}"] = local(parameter).detach().clone()

    def zero_grad(self, number: int, place: str, call: dict, seen: dict) -> None:
        self.optimizer.zero_grad()

    def module(self, number: int, place: str, call: dict, seen: dict) -> None:
        self.calls(call)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, str]:
    """(largest relative difference, its name); (0.0, "") only when all are equal bit for bit, names included."""
    if ours.keys() != theirs.keys():
        return float("inf"), f"only in one of both: {sorted(ours.keys() ^ theirs.keys())}"
    worst = (0.0, "")
    for name, value in ours.items():
        other = theirs[name]
        if value.shape != other.shape or value.dtype != other.dtype:
            return float("inf"), f"{name}: {value.dtype} {list(value.shape)}, {other.dtype} {list(other.shape)}"
        if torch.equal(value, other):
            continue
        scale = other.abs().max().clamp_min(1e-30)
        difference = float((value - other).abs().max() / scale)
        worst = max(worst, (max(difference, 1e-30) if difference == difference else float("inf"), name))
    return worst


# Memory is compared if kernels run when they are launched: else it is by chance when a block that another stream used
# comes back.
COMPARES_MEMORY = DEVICE == "cuda" and os.environ.get("SHARDPLAN_DEVICE_MODE") == "inline"
MORE_BYTES = 1024  # blocks of the allocator that a kernel takes for itself beside others


class DeviceMemory:
    """Memory that one training has allocated on a GPU where another one's models are, too."""

    def __init__(self) -> None:
        self.alive_bytes = 0
        self.peak_bytes = 0  # of the work done last

    def of(self, work: Callable):
        """Does the work."""
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        made = work()
        self.peak_bytes = self.alive_bytes + torch.cuda.max_memory_allocated() - before
        self.alive_bytes += torch.cuda.memory_allocated() - before
        return made


def compare_training(case: Case, ours: Trainer, theirs: Trainer, whole_parameters) -> tuple[float, str]:
    """Both trainings side by side -> the largest relative difference and what it is of."""
    worst = (0.0, "")
    memory = DeviceMemory(), DeviceMemory()
    for step in range(case.steps):
        if not COMPARES_MEMORY:
            seen = ours.step(step), theirs.step(step)
        else:
            seen = tuple(of.of(lambda: trainer.step(step)) for of, trainer in zip(memory, (ours, theirs)))
            peak, other = (of.peak_bytes for of in memory)
            assert peak <= other + MORE_BYTES, f"step {step}: a peak of {peak} allocated bytes, FSDP's {other}"
        difference, where = largest_difference(*seen)
        del seen
        if difference > case.tolerance:
            return difference, f"step {step}, {where}"
        worst = max(worst, (difference, f"step {step}, {where}" if where else ""))
    return max(worst, largest_difference(whole_parameters(ours.model), whole_parameters(theirs.model)))


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def compare(case: Case, plan: str) -> tuple[float, str]:
    """On a rank: the adapter next to FSDP2."""
    mesh = make_mesh(case)
    ours_model = with_plan(case, make_model(case), mesh, plan)
    theirs_model = with_fsdp2(case, make_model(case), mesh)
    ours = Trainer(case, ours_model, PlanCalls(ours_model))
    theirs = Trainer(case, theirs_model, Fsdp2Calls(theirs_model))
    return compare_training(case, ours, theirs, whole_parameters)


def said_by_fsdp2(case: Case) -> str:
    """On a rank: the error of a first forward under FSDP2."""
    args, kwargs = inputs_of(case.model, 0)
    try:
        with_fsdp2(case, make_model(case), make_mesh(case))(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return "trains"


def compare_all(cases: list[Case], plans: dict[str, str], compare=compare) -> dict[str, tuple]:
    """On a rank: case name -> ("difference", how large, of what) or ("raised", message, traceback).

    Ends behind the first case that raises: the other ranks may not have raised, and be in a collective of it.
    """
    results = {}
    for case in cases:
        try:
            results[case.name] = ("difference", *compare(case, plans[case.name]))
        except Exception as error:
            results[case.name] = ("raised", f"{type(error).__name__}: {error}", traceback.format_exc())
            break
    return results


def compare_on_ranks(cases: list[Case], folder: pathlib.Path, plans: dict[str, str], compare=compare) -> list[dict]:
    """By rank what compare_all returns, of all cases. They have one number of ranks.

    One set of processes runs them: starting it takes longer than a case. A new one is started for the cases behind one
    that raised, and for each half of those of which a rank died without a word.
    """
    ranks = cases[0].ranks
    attempt = folder / f"{cases[0].name}-{len(cases)}"
    outcomes = run_on_ranks(ranks, attempt, compare_all, cases, plans, compare)
    died = [rank for rank, outcome in enumerate(outcomes) if outcome is None or outcome[0] != "returned"]
    if died and len(cases) == 1:
        return [{cases[0].name: ("raised", f"rank {died} died: {outcomes[died[0]]}", "")}] * ranks
    done = len(cases) // 2 if died else min(len(outcome[1]) for outcome in outcomes)
    groups = [cases[:done], cases[done:]] if died else [cases[done:]]
    results = [{} if died else outcome[1] for outcome in outcomes]
    for group in filter(None, groups):
        for result, more in zip(results, compare_on_ranks(group, folder, plans, compare)):
            result.update(more)
    return results


def verdict(case: Case, results: list[dict]) -> str:
    """The fault of a case of compare_on_ranks; "" when ours equals theirs on every rank."""
    for rank, result in enumerate(results):
        what, *details = result[case.name]
        if what != "difference":
            return f"rank {rank}: {details[0]}\n{details[1]}"
        if details[0] > case.tolerance:
            return f"rank {rank}: {details[1]} differs by {details[0]:.1e} (relative)"
    return ""
