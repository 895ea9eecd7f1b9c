# SPDX-License-Identifier: Apache-2.0
"""Calls of `fully_shard` in a builder, and of the methods that it gives to modules: noted, and nothing is sharded.

A trace is of a model before FSDP, so `fully_shard` is replaced by a function that notes what it is told. The modules
then say that they are FSDP modules, as those of the training do, and their setters are noted as well. Calls of the
builder are the strategy's `setup`; calls of the step (a loss that keeps its head unsharded, say) are in its `program`.
sharding_strategy.py makes the document of it.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardplan.tracer.errors import TracerError
from shardplan.tracer.framework_setups import keep_whole

_CHECKPOINTED, _COMPILED = "_checkpoint_wrapped_module", "_orig_mod"
# Methods of a module that a strategy has no call for.
_UNSAID = (
    "set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook", "set_symm_mem_for_comm",
)
_RENAMED = {"set_reduce_scatter_divide_factor": "set_gradient_divide_factor"}
_PREFETCHES = ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch")
_HANDLES = {"unshard": "wait_for_unshard", "finalize_backward": "wait_for_gradient_reduction"}


@dataclass
class Unit:
    """A call of fully_shard. managed: its parameters, by module and own name. placed, kept: what the call's functions
    say of them."""

    modules: list[nn.Module]
    arguments: dict[str, Any]
    managed: list[tuple[nn.Module, str]] = field(default_factory=list)
    placed: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    kept: list[tuple[nn.Module, str]] = field(default_factory=list)
    ignored: list[tuple[nn.Module, str]] = field(default_factory=list)

    @staticmethod
    def of(
        modules: list[nn.Module], arguments: dict[str, Any], is_unit: Callable[[nn.Module], bool] | None = None
    ) -> Unit:
        """Asks the functions now: they know parameters that are others when a trace is made. is_unit: of modules that
        are units by themselves."""
        unit = Unit(modules, arguments)
        place = arguments.get("shard_placement_fn")
        policy = arguments.get("mp_policy")
        override = getattr(policy, "param_dtype_override_fn", None)
        left_out = {id(parameter) for parameter in arguments.get("ignored_params") or ()}
        for module in modules:
            for owner, name, parameter in _managed(module, modules, is_unit or is_noted):
                if id(parameter) in left_out:
                    unit.ignored.append((owner, name))
                    continue
                unit.managed.append((owner, name))
                if place is not None and (placed := place(parameter)) is not None:
                    unit.placed.append((owner, name, placed))
                if override is not None and override(parameter) == parameter.dtype != policy.param_dtype:
                    unit.kept.append((owner, name))
        return unit


@dataclass
class Call:
    """A call of a module's method. arguments: the fields of a strategy's call beside method and module."""

    method: str
    module: nn.Module
    arguments: dict[str, Any]
    modules: list[nn.Module] = field(default_factory=list)


@dataclass
class Sharding:
    """All that a builder and the step of its model tell FSDP."""

    units: list[Unit] = field(default_factory=list)
    setup: list[Call] = field(default_factory=list)
    shared: list[list[nn.Module]] = field(default_factory=list)  # share_comm_ctx
    unsaid: list[str] = field(default_factory=list)  # methods that a strategy has no call for
    step: list[tuple[int, Call]] = field(default_factory=list)  # and before which pass of the step
    _passes: list | None = None  # of the step that runs
    _counts: bool = True

    def note(self, call: Call) -> None:
        if call.method in _UNSAID:
            self.unsaid.append(call.method)
        elif self._passes is None:
            self.setup.append(call)
        elif self._counts:
            self.step.append((len(self._passes), call))

    def begin_building(self) -> None:
        """Notes of a model that was built before, and is given up, go."""
        for noted in (self.units, self.setup, self.shared, self.unsaid):
            noted.clear()

    def begin_step(self, passes: list, counts: bool) -> None:
        """passes: those that are over; the recording adds to them. counts: it is a recording of the step as it runs."""
        self._passes, self._counts = passes, counts
        if counts:
            self.step = []


_active: list[Sharding] = []


def begin_building() -> None:
    """A builder is called, perhaps once more (Sharding.begin_building)."""
    if _active:
        _active[-1].begin_building()


def begin_step(passes: list, counts: bool) -> None:
    """A recording of the step begins (Sharding.begin_step)."""
    if _active:
        _active[-1].begin_step(passes, counts)


@contextlib.contextmanager
def recording() -> Iterator[Sharding]:
    """Inside, fully_shard notes its calls."""
    sharding = Sharding()
    fsdp = _fsdp()
    if fsdp is None:
        yield sharding
        return
    around = contextlib.ExitStack()
    replaced: dict[Callable, Callable] = {
        fsdp.fully_shard: _noting(sharding, around),
        fsdp.register_fsdp_forward_method: lambda *_: None,
    }
    if hasattr(fsdp, "share_comm_ctx"):
        replaced[fsdp.share_comm_ctx] = lambda modules: sharding.shared.append(list(modules))
    _active.append(sharding)
    try:
        with replaced_everywhere(replaced), around:
            yield sharding
    finally:
        _active.remove(sharding)


def _fsdp() -> types.ModuleType | None:
    try:
        import torch.distributed.fsdp as fsdp
    except ImportError:  # a torch without distributed
        return None
    return fsdp if hasattr(fsdp, "fully_shard") else None


@contextlib.contextmanager
def replaced_everywhere(replaced: dict[Callable, Callable]) -> Iterator[None]:
    """Inside, names of all modules that are one of the functions are another."""
    _replace_everywhere(replaced)
    try:
        yield
    finally:
        _replace_everywhere({new: old for old, new in replaced.items()})


def _replace_everywhere(replaced: dict[Callable, Callable]) -> None:
    by_id = {id(old): new for old, new in replaced.items()}
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            if id(value) in by_id:
                names[name] = by_id[id(value)]


def _noting(sharding: Sharding, around: contextlib.ExitStack) -> Callable:
    given = {"mesh", "reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy", "ignored_params",
             "dp_mesh_dims"}

    def fully_shard(module: nn.Module | list[nn.Module], **arguments: Any) -> nn.Module | list[nn.Module]:
        if unknown := sorted(arguments.keys() - given):
            raise TypeError(f"fully_shard() got an unexpected keyword argument '{unknown[0]}'")
        modules = [module] if isinstance(module, nn.Module) else list(module)
        if not modules or any(isinstance(one, (nn.ModuleList, nn.ModuleDict)) for one in modules):
            raise ValueError(f"fully_shard does not support containers that do not implement forward: {module}")
        keep_whole(around)
        unit = Unit.of(modules, arguments)
        if not all(_wraps_unit(one) for one in modules):
            sharding.units.append(unit)
        for one in modules:
            make_fsdp_module(one)
        return module

    fully_shard.state = lambda module: None
    return fully_shard


def _wraps_unit(module: nn.Module) -> bool:
    """Whether it is a wrapper of a unit's module. Its fully_shard finds no parameter, and no hook does anything:
    accelerate shards both, a layer and its checkpoint."""
    inner = getattr(module, _CHECKPOINTED, None)
    return inner is not None and is_noted(inner)


def _managed(
    module: nn.Module, roots: list[nn.Module], is_unit: Callable[[nn.Module], bool]
) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Parameters of the module and of those below it that are no unit by themselves."""
    if is_unit(module) and all(module is not root for root in roots):
        return
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield module, name, parameter
    for child in module.children():
        yield from _managed(child, roots, is_unit)


_made: dict[type, type] = {}


def make_fsdp_module(module: nn.Module) -> None:
    """From now on it says that it is one, and notes calls of an FSDP module's methods."""
    kind = type(module)
    if kind in _made.values():
        return
    if kind not in _made:
        _made[kind] = type(kind.__name__, (_noting_methods(), kind), {"__module__": kind.__module__})
    module.__class__ = _made[kind]


def as_before(module: nn.Module) -> None:
    """Takes that back."""
    for kind, made in _made.items():
        if type(module) is made:
            module.__class__ = kind


def _noting_methods() -> type:
    """A class of FSDP modules whose methods note that they are called."""
    if _Methods.made is None:
        from torch.distributed.fsdp import FSDPModule

        members: dict[str, Any] = {
            name: _noted(name)
            for name, member in vars(FSDPModule).items()
            if isinstance(member, types.FunctionType) and (name[0] != "_" or name == "_set_unshard_async_op")
        }

        def _apply(self, *arguments, **more):
            return super(FSDPModule, self)._apply(*arguments, **more)

        def __new__(cls, *arguments, **more):  # of a container that is indexed with a slice
            kind = cls.__mro__[3]
            made = kind.__new__(kind, *arguments, **more)
            made.__init__(*arguments, **more)
            return made

        members |= {"_apply": _apply, "__new__": __new__}
        _Methods.made = type("FSDPModule", (FSDPModule,), members)
    return _Methods.made


class _Methods:
    made: type | None = None


def is_noted(module: nn.Module) -> bool:
    """Whether its `fully_shard` was noted and did nothing."""
    return _Methods.made is not None and isinstance(module, _Methods.made)


def _noted(name: str) -> Callable:
    method = _RENAMED.get(name, name)

    def call(self, *arguments: Any, **more: Any) -> Any:
        _active[-1].note(_call(method, self, arguments, more)) if _active else None
        if name in _HANDLES:
            waited = Call(_HANDLES[name], self, {})
            return types.SimpleNamespace(wait=lambda: _active[-1].note(waited) if _active else None)
        return None

    call.__name__ = name
    return call


def _call(method: str, module: nn.Module, arguments: tuple, more: dict) -> Call:
    fields: dict[str, Any] = {}
    if method not in _UNSAID and more.get("recurse", arguments[1] if len(arguments) > 1 else True) is False:
        fields["recurse"] = False
    argument = arguments[0] if arguments else next((value for name, value in more.items() if name != "recurse"), None)
    if method in _PREFETCHES:
        return Call(method, module, fields, list(argument))
    if method == "set_post_optim_event":
        fields["value"] = True
    elif isinstance(argument, bool):
        fields["value"] = argument
    elif isinstance(argument, (int, float)):
        fields["number"] = argument
    return Call(method, module, fields)


def plain_name(fqn: str) -> str:
    """A name without the wrappers of checkpoints and of torch.compile."""
    return ".".join(part for part in fqn.split(".") if part not in (_CHECKPOINTED, _COMPILED))


class Names:
    """FQNs of a model's modules as a trace has them, of wrapped ones and their wrappers alike."""

    def __init__(self, root: nn.Module) -> None:
        self._modules: dict[int, str] = {}
        for fqn, module in root.named_modules():
            self._modules.setdefault(id(module), plain_name(fqn))
        self._kept = list(root.modules())  # ids are theirs as long as they are there

    def of(self, module: nn.Module) -> str:
        if id(module) not in self._modules:
            raise TracerError(f"fully_shard is called on a {type(module).__name__} that is no module of the model")
        return self._modules[id(module)]

    def parameter(self, owner: nn.Module, name: str) -> str:
        fqn = self.of(owner)
        return f"{fqn}.{name}" if fqn else name
