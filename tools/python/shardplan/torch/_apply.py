"""apply(): shards a model's parameters as its plan says and hooks the plan's replay into forward and backward."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import os
import warnings
import weakref
from collections.abc import Callable

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from . import _flat, _optimizers, _steer
from ._agree import agree
from ._errors import PlanError
from ._extension import ExtendedParameter
from ._fit import ModelParameter, check_model, check_placement, modules_of, parameters_of, refuse_to_copy, untied, unwrapped
from ._flat_checkpoint import support_checkpoints
from ._flat_state_dict import hook_state_dicts, unhook_state_dicts
from ._init import Initialize, Source, reset_parameters
from ._mesh import data_parallel_mesh, mesh_rank, process_groups, resolve_mesh, side_channel
from ._native import native
from ._peers import connect, peers, seconds
from ._precision import casts_of, precision_of, rule_of, torch_dtype
from ._recompute import recompute
from ._replan import RequiresGrad, replan, requires_grad_of
from ._shard import (
    ShardedParameter,
    adopt_parameter,
    as_dtensor,
    gradient_unwrapper,
    shard_parameter,
    whole_parameter,
)

_ATTRIBUTE = "_shardplan_applied"
UNIT_ATTRIBUTE = "_shardplan_unit"  # of the modules of units: (what was applied, unit id)


def applied_to(model: nn.Module) -> Applied:
    """Raises ValueError for a model that no plan is applied to."""
    applied = getattr(model, _ATTRIBUTE, None)
    if applied is None:
        raise ValueError(f"shardplan: no plan is applied to this {type(model).__name__}")
    return applied


def load_plan(path: str | os.PathLike) -> native.Plan:
    """Reads and validates a plan document. Raises PlanError with the file, the place in it, found and expected."""
    try:
        return native.read_plan(os.fspath(path))
    except ValueError as error:
        raise PlanError(str(error)) from None


def check_for_use(plan, verify: bool) -> None:
    """Raises PlanError, in the verifier's words, for a plan that is not to be followed."""
    if not verify:
        warnings.warn("shardplan: the plan is not verified (verify=False)", stacklevel=3)
        return
    try:
        faults = native.check_plan_for_use(plan)
    except ValueError as error:
        raise PlanError(str(error)) from None
    for fault in faults:
        warnings.warn(f"shardplan: the plan has a fault because PyTorch has it: {fault}", stacklevel=3)


def _mesh_of_unit(plan, unit, model: nn.Module, mesh: DeviceMesh) -> tuple[DeviceMesh, bool]:
    """What data_parallel_mesh gives for the unit."""
    rule = rule_of(plan, unit.modules[0], modules_of(model)[unit.modules[0]])
    return data_parallel_mesh(plan, rule and rule.data_parallel or plan.data_parallel, mesh)


def _shard_unit(plan, unit_id: int, by_fqn: dict[str, ModelParameter], own_mesh: tuple[DeviceMesh, bool]) -> list[ShardedParameter]:
    """Replaces the unit's parameters by their shards."""
    unit = plan.units[unit_id]
    host = plan.shards_on_host(unit_id)
    sharded = [shard_parameter(by_fqn[p.fqn].parameter, *own_mesh, p.shard_dim, host) for p in unit.parameters]
    for expected, result in zip(unit.parameters, sharded):
        for slot in by_fqn[expected.fqn].slots:
            slot.module.register_parameter(slot.name, result.shard)
    return sharded


def _supply_shards(runtime, unit_id: int, unit, sharded: list[ShardedParameter]) -> None:
    """What is gathered. Of a parameter with an extension that is what the extension makes: a tensor like the shard is put
    where the shard would be."""

    def part(expected, result: ShardedParameter) -> torch.Tensor:
        if not expected.gathered:
            return result.padded
        like_the_shard = [(t.dtype, t.numel) for t in expected.gathered] == [(expected.dtype, result.padded.numel())]
        dtype = torch_dtype(expected.dtype)
        return torch.empty(result.padded.numel() if like_the_shard else 0, dtype=dtype, device=result.padded.device)

    runtime.set_shards(unit_id, [part(*both) for both in zip(unit.parameters, sharded)])


def _grad_maker(spec):
    return lambda local: as_dtensor(local, spec)


def _adopter(plan, shards: list):
    """What is called when a module holds another sharded parameter than ours."""

    def adopt(unit: int, parameter: int, found) -> None:
        adopt_parameter(plan.units[unit].parameters[parameter], shards[unit][parameter], found)

    return adopt


def _add_extensions(runtime, plan, unit_id: int, by_fqn: dict[str, ModelParameter], sharded, own: DeviceMesh, model) -> None:
    unit = plan.units[unit_id]
    if not any(expected.gathered for expected in unit.parameters):
        return
    shard_mesh = own if own.ndim == 1 else own[own.mesh_dim_names[-1]]
    precision = precision_of(plan, unit.modules[0], modules_of(model)[unit.modules[0]])
    for index, (expected, result) in enumerate(zip(unit.parameters, sharded)):
        if not expected.gathered:
            continue
        holder = by_fqn[expected.fqn].slots[0].module
        extension = ExtendedParameter(expected, result, holder, shard_mesh, precision)
        runtime.add_extension(unit_id, index, extension.inputs, extension.finish)


def _add_parameters(runtime, unit_id: int, unit, by_fqn: dict[str, ModelParameter], sharded) -> None:
    for index, (expected, result) in enumerate(zip(unit.parameters, sharded)):
        view = torch.empty(0) if expected.gathered else runtime.unsharded_view(unit_id, index)
        unsharded = whole_parameter(view, result)
        slots = [
            (slot.module, slot.module._parameters, slot.name, _flat.fast_slot(slot.module))
            for slot in by_fqn[expected.fqn].slots
        ]
        make_grad = _grad_maker(result.spec)
        runtime.add_parameter(unit_id, result.shard, unsharded, slots, make_grad, gradient_unwrapper(result))


def _make_runtime(plan, mesh: DeviceMesh, device: torch.device, groups: list, memory: str, timeout: float):
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    ranks = mesh.mesh.flatten().tolist()
    return native.Runtime(plan, mesh_rank(mesh), device, groups, side_channel(), peers(), ranks, timeout, memory == "arena")


def _hook_unit(runtime, plan, unit: int, modules: list[nn.Module], casts) -> tuple[list, Callable]:
    """Handles of the unit's hooks, and the one in front of its forward."""
    pre_forward, post_forward = runtime.hooks(unit, modules, *casts, plan.full_precision_in_eval)
    handles = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(post_forward, always_call=len(modules) > 1))
    return handles, pre_forward


def _hook_modules(plan, model: nn.Module, runtime) -> tuple[list, dict[int, Callable]]:
    """Handles of the hooks of all units, and by unit (-1: a root that is none) the one in front of its forward."""
    modules = modules_of(model)
    handles, pre_forwards = [], {}

    def hook(unit: int, of_unit: list[nn.Module], casts) -> None:
        made, pre_forwards[unit] = _hook_unit(runtime, plan, unit, of_unit, casts)
        handles.extend(made)

    for unit_id, unit in enumerate(plan.units):
        of_unit = [modules[fqn] for fqn in unit.modules]
        hook(unit_id, of_unit, casts_of(plan, unit.modules[0], of_unit[0]))
    if not any("" in unit.modules for unit in plan.units):
        # A root without parameters of its own is no unit, yet it casts inputs and outputs.
        casts = casts_of(plan, "", model)
        if casts != (None, None):
            hook(-1, [model], casts)
    return handles, pre_forwards


def _shard_all(runtime, plan, model, by_fqn, meshes: list, source: Source, groups: list) -> list:
    """Unit by unit: values come to be, this rank's part of them stays."""
    shards = []
    prepared: set[int] = set()
    for i, unit in enumerate(plan.units):
        holders = {id(s.module): s.module for p in unit.parameters for s in by_fqn[p.fqn].slots}
        source.prepare([module for key, module in holders.items() if key not in prepared])
        prepared |= holders.keys()
        if unit.flat:
            shards.append(_flat.FlatUnit(runtime, i, plan, by_fqn, groups))
        else:
            shards.append(_shard_unit(plan, i, by_fqn, meshes[i]))
            _supply_shards(runtime, i, unit, shards[i])
    source.prepare([module for module in model.modules() if id(module) not in prepared])
    return shards


def _units_of(plan) -> list[tuple]:
    return [(unit.modules, [parameter.fqn for parameter in unit.parameters]) for unit in plan.units]


_KEPT_PLANS = 8  # each has process groups' communicators and buffers of its own


@dataclasses.dataclass
class Path:
    """A plan, and what replays it."""

    plan: native.Plan
    groups: list
    runtime: native.Runtime


@dataclasses.dataclass(eq=False)
class Applied:
    """A model and the plan that it trains by at present."""

    model: nn.Module
    plan: native.Plan
    mesh: DeviceMesh
    meshes: list[tuple[DeviceMesh, bool]]  # by unit: what data_parallel_mesh gives
    device: torch.device
    groups: list
    made_groups: dict  # of process_groups: those that are not the mesh's
    runtime: native.Runtime
    by_fqn: dict[str, ModelParameter]
    shards: list  # by unit: [ShardedParameter], or a FlatUnit
    memory: str
    timeout_s: float
    handles: list = dataclasses.field(default_factory=list)
    guards: list = dataclasses.field(default_factory=list)  # handles of the hooks of state dicts
    undo: list = dataclasses.field(default_factory=list)  # functions: what else `remove` does
    settings: dict = dataclasses.field(default_factory=dict)
    sync: list[bool] | None = None  # by unit: set_requires_gradient_sync, once it was called
    pre_forwards: dict = dataclasses.field(default_factory=dict)  # by unit
    # (requires_grad, points of a step, full-precision forwards) -> Path, latest last
    kept: collections.OrderedDict = dataclasses.field(default_factory=collections.OrderedDict)
    unplannable: set = dataclasses.field(default_factory=set)  # keys of `kept`
    optimizer_seen: bool = False  # one has stepped outside of a backward
    optimizers: weakref.WeakSet = dataclasses.field(default_factory=weakref.WeakSet)  # that have parameters of the model

    def flat_units(self) -> list[_flat.FlatUnit]:
        return [shard for shard in self.shards if isinstance(shard, _flat.FlatUnit)]

    __deepcopy__ = __reduce_ex__ = refuse_to_copy

    def start(self) -> None:
        """The shards are there: makes the replayer, and hooks it into the model."""
        self.runtime.start()
        self.runtime.set_adopt(_adopter(self.plan, self.shards))
        applied = weakref.ref(self)  # the runtime is the model's, through its hooks
        self.runtime.explain_deviations(lambda unit: applied().explain(unit))
        for i, unit in enumerate(self.plan.units):
            if unit.flat:
                self.shards[i].add(self.plan, modules_of(self.model)[unit.modules[0]])
            else:
                _add_parameters(self.runtime, i, unit, self.by_fqn, self.shards[i])
                _add_extensions(self.runtime, self.plan, i, self.by_fqn, self.shards[i], self.meshes[i][0], self.model)
        self.hook()

    def hook(self) -> None:
        """From now on the model's modules pass their points to the runtime."""
        self.handles, self.pre_forwards = _hook_modules(self.plan, self.model, self.runtime)
        modules = modules_of(self.model)
        for i, unit in enumerate(self.plan.units):
            for fqn in unit.modules:
                object.__setattr__(modules[fqn], UNIT_ATTRIBUTE, (self, i))
        for (method, *arguments), value in self.settings.items():
            getattr(self.runtime, method)(*arguments, value)
        if self.optimizer_seen:
            self.runtime.expect_optimizer()
        if self.sync is not None:
            for value in (False, True):
                self.runtime.set_requires_gradient_sync([i for i, sync in enumerate(self.sync) if sync == value], value)

    def explain(self, unit: int) -> str:
        """Why the model may not pass a point of the unit, or ""."""
        modules = modules_of(self.model)
        for fqn in self.plan.units[unit].modules:
            if fqn not in modules:
                return f"module {fqn} was taken out of the model after shardplan.torch.apply"
            if getattr(modules[fqn], UNIT_ATTRIBUTE, None) != (self, unit):
                return f"module {fqn} was replaced after shardplan.torch.apply, by one that no plan is applied to"
        return ""

    def unhook(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def set(self, method: str, *arguments, value) -> None:
        """A setting of the runtime, which also holds for the one of the next plan."""
        getattr(self.runtime, method)(*arguments, value)
        self.settings[(method, *arguments)] = value

    def set_sync(self, units: list[int], value: bool) -> None:
        """set_requires_gradient_sync, which also holds for the next plan."""
        if self.sync is None:
            self.sync = [True] * len(self.plan.units)
        for unit in units:
            self.sync[unit] = value
        self.runtime.set_requires_gradient_sync(units, value)

    def fall_back_on_deviation(self) -> None:
        applied = weakref.ref(self)  # the runtime is the model's, through its hooks

        def on_step_end() -> None:
            if applied() is not None:
                applied().follow(applied().runtime.log)

        def on_requires_grad_change(unit: int, change: str):
            return applied().follow_requires_grad(unit, change)

        self.runtime.fall_back_on_deviation(on_step_end)
        if not self.flat_units():
            self.runtime.on_requires_grad_change(on_requires_grad_change)

    def follow(self, log: list[tuple]) -> None:
        """The step that deviated is over: the next one follows a plan made of the points that it passed, one that is kept if
        there was such a step before."""
        deviation, full_precision = self.runtime.deviation, self.runtime.full_precision_forwards
        points = tuple((kind, unit, tuple(gradients), keeps) for kind, unit, gradients, keeps in log)
        key = (requires_grad_of(self.plan), points, tuple(full_precision))
        self._leave()
        if key in self.unplannable:
            return
        if key in self.kept:
            return self._take(key)
        try:
            plan = self._plan_again(log, requires_grad_of(self.plan), full_precision)
        except PlanError as error:
            self.unplannable.add(key)
            warnings.warn(f"shardplan: {deviation}; such a step cannot be planned ({error}): it is always done on demand", stacklevel=2)
            return
        warnings.warn(f"shardplan: {deviation}; the next step is planned again", stacklevel=2)
        self._start_plan(key, plan)

    def follow_requires_grad(self, unit: int, change: str):
        """A step begins after parameters were frozen or unfrozen: it follows the plan that was followed last when they required
        gradients as now, or a plan for the same points. Such a step need not pass these: then the one behind it is planned
        again. Returns the unit's pre-forward hook."""
        requires_grad = tuple(tuple(one.shard.requires_grad for one in sharded) for sharded in self.shards)
        known = [key for key in self.kept if key[0] == requires_grad]
        if not known:
            try:
                plan = self._plan_again(self.runtime.planned_log, requires_grad, self.runtime.full_precision_forwards)
            except PlanError as error:
                raise RuntimeError(f"shardplan: {change} ({error})") from None
            warnings.warn(f"shardplan: {change}; the step is planned again", stacklevel=2)
        self._leave()
        if known:
            self._take(known[-1])
        else:
            self._start_plan((requires_grad, (), ()), plan)
        return self.pre_forwards[unit]

    def _leave(self) -> None:
        """The present plan is at its first trigger."""
        self.optimizer_seen = self.optimizer_seen or self.runtime.optimizer_seen
        self.runtime.restart()

    def _plan_again(self, log: list[tuple], requires_grad: RequiresGrad, full_precision: list[bool]):
        names = {fqn: type(unwrapped(module)).__name__ for fqn, module in modules_of(self.model).items()}
        plan = replan(self.plan, log, names, requires_grad, full_precision)
        if _units_of(plan) != _units_of(self.plan):
            raise PlanError("the model has other modules or parameters than the plan")
        return plan

    def _start_plan(self, key: tuple, plan) -> None:
        """Follows a new plan, and keeps it."""
        if not self.kept:  # the first plan, whatever its points
            self.kept[requires_grad_of(self.plan), (), ()] = Path(self.plan, self.groups, self.runtime)
        groups = connect(lambda: process_groups(plan, self.mesh, self.made_groups, self.timeout_s), self.timeout_s)
        runtime = _make_runtime(plan, self.mesh, self.device, groups, self.memory, self.timeout_s)
        step = self.runtime.step
        self.kept[key] = Path(plan, groups, runtime)
        while len(self.kept) > _KEPT_PLANS:
            self.kept.popitem(last=False)
        self._write_back()
        self.unhook()
        self.plan, self.groups, self.runtime = plan, groups, runtime
        for i, sharded in enumerate(self.shards):
            if isinstance(sharded, _flat.FlatUnit):
                sharded.supply(runtime)
            else:
                _supply_shards(runtime, i, plan.units[i], sharded)
        self.start()
        self.runtime.step = step
        self.fall_back_on_deviation()

    def _write_back(self) -> None:
        for flat in self.flat_units():
            flat.write_back()  # what the user replaced since

    def _take(self, key: tuple) -> None:
        """A plan that was followed before is followed again."""
        self.kept.move_to_end(key)
        path = self.kept[key]
        path.runtime.step = self.runtime.step
        self._write_back()
        self.unhook()
        self.plan, self.groups, self.runtime = path.plan, path.groups, path.runtime
        for flat in self.flat_units():
            flat.runtime = path.runtime
        self.hook()


def _guard_state_dict(model: nn.Module, applied: Applied) -> None:
    """Between a forward and its backward some modules hold whole parameters: shards are saved all the same, not loaded."""

    def check(*_args, **_kwargs) -> None:
        if not applied.runtime.between_steps:
            raise RuntimeError(
                "shardplan: load_state_dict works between steps only; a forward has run whose backward has not finished "
                "(shardplan.torch.abandon_step gives its step up)"
            )

    def show(*_args, **_kwargs) -> None:
        """The shards are valid at any time; the modules of gathered units hold whole parameters instead."""
        if applied.flat_units() and not applied.runtime.between_steps:
            raise RuntimeError(
                "shardplan: state_dict of flat parameters works between steps only; a forward has run whose backward has not "
                "finished (shardplan.torch.abandon_step gives its step up)"
            )
        applied.runtime.show_shards(True)

    def hide(*_args, **_kwargs) -> None:
        applied.runtime.show_shards(False)

    applied.guards += [
        model.register_state_dict_pre_hook(show),
        model.register_state_dict_post_hook(hide),
        model.register_load_state_dict_pre_hook(check),
    ]


def apply(
    model: nn.Module,
    plan: str | os.PathLike | native.Plan,
    mesh: DeviceMesh | None = None,
    *,
    initialize: Initialize = reset_parameters,
    broadcast_from_rank_0: bool = False,
    on_deviation: str = "stop",
    memory: str = "allocator",
    verify: bool = True,
    timeout: float | datetime.timedelta | None = None,
) -> nn.Module:
    """Makes `model` train by replaying `plan`; returns the same module.

    model: whole parameters, the same on all ranks (this rank keeps its slices), or parameters on the meta device.
    initialize: fills the parameters and buffers of one module (not of its children) that was on the meta device. A unit
    comes to be, is sharded and goes before the next one comes.
    on_deviation: what happens in a step that does not pass the plan's points. "stop": RuntimeError where it deviates.
    "replan": a warning that says where; the step is finished on demand, slowly, and the next one follows a plan made of what
    this one did (all ranks have to deviate alike). Plans are kept: one is made for each way that steps go.
    memory: of what is gathered and reduced. "allocator": PyTorch's caching allocator. "arena": one block, every buffer at an
    address of its own (on GPUs NCCL's memory, registered with its communicators).
    broadcast_from_rank_0: parameters and buffers of the mesh's first rank count, whatever the others hold.
    plan: a plan document's path, or what load_plan returned. What its strategy recomputes runs under PyTorch's
    checkpoint, unless the model has wrappers for that already.
    timeout: seconds after which a collective of the plan, on any communicator, has failed, and after which ranks that do not
    come to this call are given up. None: the default process group's (init_process_group).
    verify: whether the plan is verified first. A plan that does what PyTorch itself does wrong warns; any other that does not
    verify raises. False: it is followed as it is, with a warning.
    mesh: ranks in the plan's arrangement; None: all ranks of the default process group.

    Parameters become DTensors, Shard(0) over FSDP's dimension of the mesh, laid out as FSDP2 lays them out: optimizers,
    gradient clipping and torch.distributed.checkpoint work on them. Create the optimizer after this call.

    Raises PlanError (a RuntimeError) when the plan cannot be read, does not verify (naming rule and place), was made for
    another model (naming the parameter, what was expected and what was found) or for other ranks, or when ranks differ in
    plan, model or version (naming them). RuntimeError for a step that deviates names the first point
    that differs, found and expected.
    """
    if on_deviation not in ("stop", "replan"):
        raise ValueError(f'on_deviation is "stop" or "replan", not {on_deviation!r}')
    if memory not in ("allocator", "arena"):
        raise ValueError(f'memory is "allocator" or "arena", not {memory!r}')
    if hasattr(model, _ATTRIBUTE):
        raise PlanError("a plan is applied to this model already")
    timeout_s = seconds(timeout)
    peers()  # are watched from here on
    try:
        if not isinstance(plan, native.Plan):
            plan = load_plan(plan)
        check_for_use(plan, verify)
        by_fqn = untied(plan, parameters_of(model))
        check_model(plan, model, by_fqn)
        device = check_placement(by_fqn, mesh)
    except Exception as error:
        with contextlib.suppress(PlanError):
            agree(model, None, mesh, timeout_s, failure=str(error) or type(error).__name__)
        raise
    agree(model, plan, mesh, timeout_s)
    made_groups: dict = {}

    def make_groups() -> tuple:
        resolved = resolve_mesh(plan, mesh, device)
        meshes = [_mesh_of_unit(plan, unit, model, resolved) for unit in plan.units]
        return resolved, meshes, process_groups(plan, resolved, made_groups, timeout_s)  # those of flattened meshes, too

    mesh, meshes, groups = connect(make_groups, timeout_s)
    runtime = _make_runtime(plan, mesh, device, groups, memory, timeout_s)
    source = Source(by_fqn, mesh, device, initialize, broadcast_from_rank_0)
    shards = _shard_all(runtime, plan, model, by_fqn, meshes, source, groups)
    applied = Applied(
        model, plan, mesh, meshes, device, groups, made_groups, runtime, by_fqn, shards, memory, timeout_s
    )
    applied.undo.append(recompute(plan, model))
    applied.start()
    if plan.policy == "fsdp1":
        flat = applied.flat_units()
        _flat.remember(model, flat)
        hook_state_dicts(model, flat, mesh)
        support_checkpoints(flat)
        undo_casts = _flat.cast_buffers(plan, model)
        applied.undo += [lambda: _flat.forget(model), lambda: unhook_state_dicts(model), undo_casts]
    if on_deviation == "replan":
        applied.fall_back_on_deviation()
    _guard_state_dict(model, applied)
    object.__setattr__(model, _ATTRIBUTE, applied)
    _steer.add_methods(model, plan.policy)
    _optimizers.watch(applied)
    return model
