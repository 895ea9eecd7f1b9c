# SPDX-License-Identifier: Apache-2.0
"""The handle of an applied plan: what is the model's, what is the runtime's, and the hooks between them."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from .._job.mesh import Given, OwnMesh
from .._job.native import native
from .._model.fit import ModelParameter, modules_of, refuse_to_copy
from .._model.forwards import recompute
from .._model.skeleton import Skeleton
from .._parameters.flat import FlatUnit
from .._parameters.offload import offload
from .._parameters.shard import adopt_parameter
from .runtime import add_extensions, add_parameters, adopter, hook_modules

ATTRIBUTE = "_shardplan_applied"  # of the model
# On the modules of units: (what was applied, unit id of their first parameter group).
UNIT_ATTRIBUTE = "_shardplan_unit"


def applied_to(model: nn.Module) -> Applied:
    """Raises ValueError for a model that no plan is applied to."""
    applied = getattr(model, ATTRIBUTE, None)
    if applied is None:
        raise ValueError(f"shardplan: no plan is applied to this {type(model).__name__}")
    return applied


def _in_turn(hooks: list[Callable], afterwards: Callable[[], None]) -> Callable:
    """One forward pre-hook of some."""

    def run(module: nn.Module, args: tuple, kwargs: dict):
        changed = None
        for hook in hooks:
            given = hook(module, *(changed or (args, kwargs)))
            changed = given if given is not None else changed
        afterwards()
        return changed

    return run


def applied_above(module: nn.Module) -> Applied:
    """The plan applied to a unit's module or the root. Raises ValueError for others."""
    of_unit = getattr(module, UNIT_ATTRIBUTE, None)
    return of_unit[0] if of_unit is not None else applied_to(module)


@dataclasses.dataclass(eq=False)
class Applied:
    """A model and the plan that it trains by at present."""

    model: nn.Module
    plan: native.Plan
    mesh: DeviceMesh
    given: Given
    meshes: list[OwnMesh]  # by unit
    device: torch.device
    groups: list
    made_groups: dict  # of process_groups: those that are not the mesh's
    runtime: native.Runtime
    by_fqn: dict[str, ModelParameter]
    shards: list  # by unit: [ShardedParameter], or a FlatUnit
    memory: str
    timeout_s: float
    replaced: dict[int, weakref.ref]  # by id: whole parameters that shards took the places of
    skeleton: Skeleton | None  # of a model of auto()
    make_following: Callable[[Applied], Any]  # KeptPlans
    make_setters: Callable[[Applied], Any]  # Setters; None for a plan of fsdp1

    def __post_init__(self) -> None:
        self.handles: list = []
        self.at_removal: list[Callable[[], None]] = []  # what else `remove` does
        self.settings: dict = {}
        self.sync: list[bool] | None = None  # by unit: do backwards reduce? Once it was said
        self.user_sync: dict[int, bool] = {}  # by unit: the user's last set_requires_gradient_sync
        self.pre_forwards: dict = {}  # by unit
        self.step_begins = False  # the functions below are being called
        self.at_next_step: list = []  # functions, called once where a step begins: (module, args, kwargs)
        self.optimizer_seen = False  # one has stepped outside of a backward
        self.awaits_optimizer = False  # one is likely to
        self.profile: Any = None  # Profile, while its context lasts
        self.optimizers: weakref.WeakSet = weakref.WeakSet()  # that have parameters of the model
        self._undo_forwards: list[Callable[[], None]] = []
        self.following = self.make_following(self)
        self.setters = self.make_setters(self)

    def flat_units(self) -> list[FlatUnit]:
        return [shard for shard in self.shards if isinstance(shard, FlatUnit)]

    __deepcopy__ = __reduce_ex__ = refuse_to_copy

    def fqn_of(self, module: nn.Module) -> str:
        """The module's name in the plan. Raises ValueError for a module that is not the model's."""
        for fqn, own in modules_of(self.model).items():
            if own is module:
                return fqn
        raise ValueError(f"shardplan: {type(module).__name__} is no module of the model that the plan is applied to")

    def replace_forwards(self) -> None:
        """Modules recompute, and hand over their activations, as the plan has it."""
        undo_recompute = recompute(self.plan, self.model)
        self._undo_forwards = [offload(self.plan, self.model, self.device, self.runtime), undo_recompute]

    def restore_forwards(self) -> None:
        """The reverse of `replace_forwards`."""
        for undo in self._undo_forwards:
            undo()
        self._undo_forwards = []

    def replay_by(self, plan: native.Plan, groups: list, runtime: native.Runtime) -> None:
        """Another plan of the same units is the present one, between `unhook` and `hook`."""
        self.plan, self.groups, self.runtime = plan, groups, runtime

    def exchange(
        self, plan: native.Plan, meshes: list, groups: list, runtime: native.Runtime, shards: list, same_units: bool
    ) -> None:
        """A plan of other units is the present one, between `restore_forwards` and `replace_forwards`. same_units: what
        the user has set holds for them."""
        self.replay_by(plan, groups, runtime)
        self.meshes, self.shards = meshes, shards
        if not same_units:
            self.settings, self.sync = {}, None
        self.following = self.make_following(self)
        self.setters = self.make_setters(self)

    def start(self) -> None:
        """The shards are there: makes the replayer, and hooks it into the model."""
        self._adopt_swapped()
        self.runtime.start()
        self.runtime.set_adopt(adopter(self.plan, self.shards))
        applied = weakref.ref(self)  # the runtime is the model's, through its hooks
        self.runtime.explain_deviations(lambda unit: applied().explain(unit))
        for i, unit in enumerate(self.plan.units):
            if unit.flat:
                self.shards[i].add(self.plan, modules_of(self.model)[unit.modules[0]])
            else:
                add_parameters(self.runtime, i, unit, self.by_fqn, self.shards[i])
                add_extensions(self.runtime, self.plan, i, self.by_fqn, self.shards[i], self.meshes[i].mesh, self.model)
        self.hook()

    def _adopt_swapped(self) -> None:
        """Module.to_empty and load_state_dict give a sharded parameter other memory; what the runtime before did not
        see is taken over here."""
        for unit, of_unit in zip(self.plan.units, self.shards):
            if unit.flat:
                continue
            for expected, sharded in zip(unit.parameters, of_unit):
                adopt_parameter(expected, sharded, sharded.shard)

    def hook(self) -> None:
        """From now on the model's modules pass their points to the runtime."""
        self.runtime.leave(False)
        self.handles, self.pre_forwards = hook_modules(self.plan, self.model, self.runtime)
        self._wait_for_step()
        if self.awaits_optimizer:
            self.await_optimizer()
        modules = modules_of(self.model)
        for i, unit in enumerate(self.plan.units):
            for fqn in unit.modules:
                object.__setattr__(modules[fqn], UNIT_ATTRIBUTE, (self, i - unit.parameter_group))
        for (method, *arguments), value in self.settings.items():
            getattr(self.runtime, method)(*arguments, value)
        if self.optimizer_seen:
            self.runtime.expect_optimizer()
        if self.profile is not None:
            self.profile.followed()
        if self.sync is not None:
            for value in (False, True):
                self.runtime.set_requires_gradient_sync([i for i, sync in enumerate(self.sync) if sync == value], value)

    def await_optimizer(self) -> None:
        """Steps end where an optimizer steps, once one has been seen."""
        self.awaits_optimizer = True
        applied = weakref.ref(self)
        self.runtime.on_left(lambda module: applied().hook_of(module))
        self.runtime.await_optimizer()

    def explain(self, unit: int) -> str:
        """Why the model may not pass a point of the unit, or ""."""
        modules = modules_of(self.model)
        unit -= self.plan.units[unit].parameter_group
        for fqn in self.plan.units[unit].modules:
            if fqn not in modules:
                return f"module {fqn} was taken out of the model after shardplan.torch.apply"
            if getattr(modules[fqn], UNIT_ATTRIBUTE, None) != (self, unit):
                return f"module {fqn} was replaced after shardplan.torch.apply, by one that no plan is applied to"
        return ""

    def leave(self) -> None:
        """The present plan is at its first trigger."""
        self.optimizer_seen = self.optimizer_seen or self.runtime.optimizer_seen
        self.runtime.restart()

    def note_profile(self, profile: Any) -> None:
        """A Profile whose context lasts from now on, or None."""
        self.profile = profile

    def unhook(self) -> None:
        self.runtime.leave(True)
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def before_next_step(self, function: Callable[[nn.Module, tuple, dict], None], first: bool = False) -> None:
        """function(module, args, kwargs) is called where the next step begins: by the forward of which module, with
        which arguments. It may make the model follow another plan. first: before the functions that are there."""
        self.at_next_step.insert(0 if first else len(self.at_next_step), function)
        self._wait_for_step()

    def _wait_for_step(self) -> None:
        """For a step that begins now it is the one behind it: so the runtime is told when it has begun."""
        if not self.at_next_step or self.step_begins:
            return
        applied = weakref.ref(self)
        self.runtime.at_next_step(lambda _unit, module, args, kwargs: applied()._step_begins(module, args, kwargs))

    def _step_begins(self, module: nn.Module, args: tuple, kwargs: dict):
        """The module's pre-forward hook in another plan, where one is followed now."""
        runtime = self.runtime
        functions, self.at_next_step = self.at_next_step, []
        self.step_begins = True
        try:
            for function in functions:
                function(module, args, kwargs)
        finally:
            self.step_begins = False
        if self.runtime is runtime:
            self._wait_for_step()
            return None
        return self.hook_of(module)

    def hook_of(self, module: nn.Module) -> Callable:
        """The module's forward pre-hook in the plan that is followed now."""
        modules = modules_of(self.model)
        units = [i for i, unit in enumerate(self.plan.units) if any(modules[fqn] is module for fqn in unit.modules)]
        hooks = [self.pre_forwards[unit] for unit in units or [-1] if unit in self.pre_forwards]
        return _in_turn(hooks, self._wait_for_step)

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
