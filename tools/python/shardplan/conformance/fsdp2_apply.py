"""Does to a model what a strategy of the policy fsdp2 says, with PyTorch's own calls."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from shardplan.conformance.case import CaseError
from shardplan.conformance.units import UnitCall, picked

_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")


class AppliedFsdp2:
    """`modules`: by the FQNs of the plain model. `order`: FQNs in the order in which the first forward enters them."""

    def __init__(
        self, calls: list[UnitCall], strategy: dict, mesh: DeviceMesh, modules: dict[str, nn.Module], order: list[str]
    ):
        self._calls, self._strategy, self._mesh, self._modules = calls, strategy, mesh, modules
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
        arguments: dict = {"mesh": self._mesh}
        reshard = picked(call, self._strategy, "reshard_after_forward")
        if reshard is not None:
            arguments["reshard_after_forward"] = reshard
        if mixed := picked(call, self._strategy, "mixed_precision"):
            dtypes = {name: getattr(torch, mixed[name]) for name in _DTYPES if name in mixed}
            cast = mixed.get("cast_forward_inputs", True)
            arguments["mp_policy"] = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=cast)
        if picked(call, self._strategy, "cpu_offload"):
            arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=False)  # there is nothing to pin memory for
        else:
            arguments["offload_policy"] = OffloadPolicy()
        if ignored := self._strategy.get("ignored_parameters"):
            named = dict(self.module("").named_parameters(remove_duplicate=False))
            arguments["ignored_params"] = {named[_inner(named, fqn)] for fqn in ignored}
        fully_shard(modules if len(modules) > 1 else modules[0], **arguments)

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
        if knobs.get("unshard_async_op"):
            self.module("")._set_unshard_async_op(True)
        for unit in units:
            if knobs.get("force_sum_reduction"):
                unit.set_force_sum_reduction_for_comms(True)
            if (factor := knobs.get("gradient_divide_factor")) is not None:
                unit.set_gradient_divide_factor(factor)
            if knobs.get("allocate_memory_from_process_group"):
                unit.set_allocate_memory_from_process_group_for_comm(True)
        unknown = set(knobs) - _APPLIED
        if unknown:
            raise CaseError(f"/fsdp2/{sorted(unknown)[0]}: not something that a recording can be made of yet")

    def _first(self, fqn: str) -> nn.Module:
        """A unit by its FQN; a group by its FQNs with commas, or by one of them."""
        return self.module(fqn.split(",")[0])

    def _set_distances(self, knobs: dict, order: list[str]) -> None:
        """Lists of the next and the previous units in the order of the first forward; the root keeps its own."""
        units = {fqn: call.modules[0] for call in self._calls for fqn in call.modules if "" not in call.modules}
        names = list(dict.fromkeys(units[fqn] for fqn in order if fqn in units))
        modules = [self.module(fqn) for fqn in names]
        modules = [m for m in modules if m._get_fsdp_state()._fsdp_param_group is not None]
        for i, module in enumerate(modules):
            if ahead := modules[i + 1 : i + 1 + knobs.get("forward_prefetch", 0)]:
                module.set_modules_to_forward_prefetch(ahead)
            depth = max(knobs.get("backward_prefetch", -1), 0)
            if behind := modules[max(0, i - depth) : i][::-1]:
                module.set_modules_to_backward_prefetch(behind)

    def module_call(self, call: dict) -> None:
        method = getattr(self.module(call.get("module", "")), call["method"])
        arguments: dict = {"recurse": False} if call.get("recurse") is False else {}
        if call["method"] == "unshard":
            method(async_op=call.get("value", False))
        elif call["method"] == "reshard":
            method()
        elif call.get("modules"):
            method([self._first(fqn) for fqn in call["modules"]])
        else:
            method(call["number"] if "number" in call else call.get("value", True), **arguments)


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
}


def _inner(named: dict, fqn: str) -> str:
    """The name that a parameter has with checkpoint wrappers around its modules."""
    return next(name for name in named if name.replace("_checkpoint_wrapped_module.", "") == fqn)
