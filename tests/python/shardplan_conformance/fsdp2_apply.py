# SPDX-License-Identifier: Apache-2.0
"""Does to a model what a strategy of the policy fsdp2 says, with PyTorch's own calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard, share_comm_ctx,
)
from torch.distributed.tensor import Shard

from shardplan_conformance.case import CaseError
from shardplan_conformance.extension import extend_parameters
from shardplan_conformance.installed_fsdp import PLACES_ON_MESHES, mesh_info, parameter_groups, placed_on
from shardplan_conformance.units import UnitCall, matches_any, matching_names, picked

_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")


class AppliedFsdp2:
    """`mesh`: all of it. `modules`: by the FQNs of the plain model. `order`: FQNs in the order in which the first
    forward enters them."""

    def __init__(
        self, calls: list[UnitCall], strategy: dict, mesh: DeviceMesh, modules: dict[str, nn.Module], order: list[str]
    ):
        self._calls, self._strategy, self._mesh, self._modules = calls, strategy, mesh, modules
        self._flat_meshes: dict[str, DeviceMesh] = {}
        self._handles: dict = {}  # of unshard, by module
        self._reduction = None  # the handle of a backward that was finalized asynchronously
        self._shard_dims = self._dims_by_parameter(strategy.get("fsdp2", {}).get("shard_dims", []))
        extend_parameters(self._named_parameters(), strategy.get("fsdp2", {}).get("extensions", []))
        for call in self._calls:
            self._shard(call)
        self._set_knobs(order)
        for call in strategy.get("setup", []):
            self.module_call(call)

    def module(self, fqn: str) -> nn.Module:
        if fqn not in self._modules:
            raise CaseError(f'there is no module "{fqn}"')
        return self._modules[fqn]

    def _shard(self, call: UnitCall) -> None:
        modules = [self.module(fqn) for fqn in call.modules]
        arguments: dict = {"mesh": self._data_parallel_mesh(picked(call, self._strategy, "data_parallel"))}
        if place := self._placement(call):
            arguments["shard_placement_fn"] = place
        reshard = picked(call, self._strategy, "reshard_after_forward")
        if reshard is not None:
            arguments["reshard_after_forward"] = reshard
        if mixed := picked(call, self._strategy, "mixed_precision"):
            dtypes = {name: getattr(torch, mixed[name]) for name in _DTYPES if name in mixed}
            cast = mixed.get("cast_forward_inputs", True)
            arguments["mp_policy"] = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=cast, **self._kept(mixed))
        if picked(call, self._strategy, "cpu_offload"):
            arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=False)  # there is nothing to pin memory for
        else:
            arguments["offload_policy"] = OffloadPolicy()
        if ignored := self._strategy.get("ignored_parameters"):
            named = self._named_parameters()
            arguments["ignored_params"] = {named[fqn] for fqn in ignored if fqn in named}
        fully_shard(modules if len(modules) > 1 else modules[0], **arguments)

    def _kept(self, mixed: dict) -> dict:
        """param_dtype_override_fn, where some parameters keep their own dtype."""
        patterns = mixed.get("keep_param_dtype", [])
        if not patterns:
            return {}
        if not hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn"):
            raise CaseError(f"/mixed_precision/keep_param_dtype: PyTorch {torch.__version__} does not have it")
        kept = {parameter for name, parameter in self._named_parameters().items() if matches_any(patterns, name)}
        return {"param_dtype_override_fn": lambda parameter: parameter.dtype if parameter in kept else None}

    def _placement(self, call: UnitCall) -> Callable | None:
        """shard_placement_fn, where there is something to say: dimensions, and meshes of some parameters."""
        rules = call.rule.get("parameter_meshes", [])
        if rules and not PLACES_ON_MESHES:
            raise CaseError("/units/parameter_meshes: the installed PyTorch has no ShardPlacementResult")
        if not rules and not self._shard_dims:
            return None
        infos = [mesh_info(self._data_parallel_mesh(rule["data_parallel"])) for rule in rules]
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self._named_parameters().items():
            names.setdefault(parameter, []).append(name)

        def place(parameter: nn.Parameter):
            shard = Shard(self._shard_dims[parameter]) if parameter in self._shard_dims else None
            for rule, info in zip(rules, infos):
                if any(matches_any(rule["parameters"], name) for name in names[parameter]):
                    return placed_on(info, shard)
            return shard

        return place

    def _data_parallel_mesh(self, given: dict | None) -> DeviceMesh:
        """One dimension, or two for HSDP; several of the mesh's are flattened into one."""
        names = self._mesh.mesh_dim_names or ()
        dims = given or {"shard": ["shard"], "replicate": [name for name in names if name == "replicate"]}
        return self._mesh[tuple(self._flattened(dims[kind]) for kind in ("replicate", "shard") if dims.get(kind))]

    def _flattened(self, dims: list[str]) -> str:
        if len(dims) == 1:
            return dims[0]
        name = "_".join(dims)
        if name not in self._flat_meshes:
            self._flat_meshes[name] = self._mesh[tuple(dims)]._flatten(name)
        return name

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        """Under the names that they have without checkpoint wrappers around their modules."""
        named = self.module("").named_parameters(remove_duplicate=False)
        return {name.replace("_checkpoint_wrapped_module.", ""): parameter for name, parameter in named}

    def _dims_by_parameter(self, rules: list[dict]) -> dict[nn.Parameter, int]:
        """The dimension of the first rule that names the parameter, by any of its names."""
        dims: dict[nn.Parameter, int] = {}
        for rule in rules:
            for name, parameter in self._named_parameters().items():
                if matches_any(rule["parameters"], name):
                    dims.setdefault(parameter, rule.get("dim", 0))
        return dims

    def _set_knobs(self, order: list[str]) -> None:
        knobs = self._strategy.get("fsdp2", {})
        if knobs.get("backward_prefetch", -1) == 0:
            raise CaseError("/fsdp2/backward_prefetch: PyTorch has no way to turn the implicit backward prefetch off")
        self._set_distances(knobs, order)
        for entry in knobs.get("forward_prefetch_lists", []):
            targets = [self._first(fqn) for fqn in entry["prefetch"]]
            self._first(entry["unit"]).set_modules_to_forward_prefetch(targets)
        for entry in knobs.get("backward_prefetch_lists", []):
            targets = [self._first(fqn) for fqn in entry["prefetch"]]
            self._first(entry["unit"]).set_modules_to_backward_prefetch(targets)
        units = [self.module(call.modules[0]) for call in self._calls]
        for unit in units:
            if knobs.get("unshard_async_op"):
                unit._set_unshard_async_op(True)
            if knobs.get("force_sum_reduction"):
                unit.set_force_sum_reduction_for_comms(True)
            if (factor := knobs.get("gradient_divide_factor")) is not None:
                unit.set_gradient_divide_factor(factor)
            if knobs.get("allocate_memory_from_process_group"):
                unit.set_allocate_memory_from_process_group_for_comm(True)
            if in_flight := knobs.get("reduce_scatter_inputs_in_flight"):
                _installed(unit, "set_reduce_scatter_max_input_buffers", "reduce_scatter_inputs_in_flight")(in_flight)
        if knobs.get("separate_reduce_scatter_communicator"):
            _installed(units[-1], "set_separate_reduce_scatter_group", "separate_reduce_scatter_communicator")()
        for roots in knobs.get("shared_comm_contexts", []):
            share_comm_ctx([unit for entry in roots for unit in self._units_named(entry)])
        for hook in reversed(knobs.get("all_reduce_hooks", [])):  # the first that names a unit counts
            self._set_hook(hook)
        unknown = set(knobs) - _APPLIED
        if unknown:
            raise CaseError(f"/fsdp2/{sorted(unknown)[0]}: not something that a recording can be made of yet")

    def _set_hook(self, hook: dict) -> None:
        named = [fqn for entry in hook.get("modules", []) for fqn in matching_names(self._modules, entry)]
        group = self._mesh.get_group(hook["mesh_dim"]) if hook.get("mesh_dim") else None
        op = dist.ReduceOp.AVG if hook.get("reduce_op") == "average" else dist.ReduceOp.SUM

        def reduce(gradients: torch.Tensor) -> None:
            if group is not None and group.size() > 1:
                dist.all_reduce(gradients, op=op, group=group)
            if "divide" in hook:
                gradients.div_(hook["divide"])

        for call in self._calls:
            if not hook.get("modules") or set(call.modules) & set(named):
                stream = {"stream": torch.cpu.Stream()} if hook.get("own_stream") else {}
                self.module(call.modules[0]).set_all_reduce_hook(reduce, **stream)

    def optimizer_stepped(self) -> None:
        if not self._strategy.get("fsdp2", {}).get("post_optim_event"):
            return
        for fqn in {call.modules[0] for call in self._calls}:
            self.module(fqn).set_post_optim_event(torch.cpu.current_stream().record_event())

    def _first(self, fqn: str) -> nn.Module:
        """A unit by its FQN; a group by its FQNs with commas, or by one of them."""
        return self.module(fqn.split(",")[0])

    def _units_named(self, entry: str) -> list[nn.Module]:
        """One by its name, or those of all modules that a pattern or class matches."""
        if entry.split(",")[0] in self._modules:
            return [self._first(entry)]
        return [
            self.module(fqn) for fqn in matching_names(self._modules, entry) if isinstance(self.module(fqn), FSDPModule)
        ]

    def _set_distances(self, knobs: dict, order: list[str]) -> None:
        """Lists of the next and the previous units in the order of the first forward; the root keeps its own."""
        units = {fqn: call.modules[0] for call in self._calls for fqn in call.modules if "" not in call.modules}
        names = list(dict.fromkeys(units[fqn] for fqn in order if fqn in units))
        modules = [self.module(fqn) for fqn in names]
        modules = [m for m in modules if parameter_groups(m)]
        for i, module in enumerate(modules):
            if ahead := modules[i + 1 : i + 1 + knobs.get("forward_prefetch", 0)]:
                module.set_modules_to_forward_prefetch(ahead)
            depth = max(knobs.get("backward_prefetch", -1), 0)
            if behind := modules[max(0, i - depth) : i][::-1]:
                module.set_modules_to_backward_prefetch(behind)

    def module_call(self, call: dict) -> None:
        module = self.module(call.get("module", ""))
        if call["method"] == "wait_for_unshard":
            if (handle := self._handles.pop(module, None)) is not None:
                handle.wait()
            return
        if call["method"] == "wait_for_gradient_reduction":
            if self._reduction is not None:
                self._reduction.wait()
            return
        method = getattr(module, call["method"])
        arguments: dict = {"recurse": False} if call.get("recurse") is False else {}
        if call["method"] == "unshard":
            self._handles[module] = method(async_op=call.get("value", False))
        elif call["method"] == "state_dict":
            method()
        elif call["method"] == "load_state_dict":
            method(module.state_dict())
        elif call["method"] == "set_post_optim_event":
            method(torch.cpu.current_stream().record_event())
        elif call["method"] in ("reshard", "reset_iter_state"):
            method()
        elif call["method"] == "finalize_backward":
            self._reduction = method(async_op=call.get("value", False))
        elif call.get("modules"):
            method([self._first(fqn) for fqn in call["modules"]])
        else:
            method(call["number"] if "number" in call else call.get("value", True), **arguments)


def _installed(unit: nn.Module, setter: str, knob: str):
    """The setter of a knob that not every release has."""
    if not hasattr(unit, setter):
        raise CaseError(f"/fsdp2/{knob}: PyTorch {torch.__version__} does not have it")
    return getattr(unit, setter)


_APPLIED = {
    "forward_prefetch",
    "backward_prefetch",
    "forward_prefetch_lists",
    "backward_prefetch_lists",
    "unshard_async_op",
    "gradient_divide_factor",
    "force_sum_reduction",
    "allocate_memory_from_process_group",
    "shard_root",
    "shard_dims",
    "extensions",
    "all_reduce_hooks",
    "post_optim_event",
    "shared_comm_contexts",
    "reduce_scatter_inputs_in_flight",
    "separate_reduce_scatter_communicator",
}
