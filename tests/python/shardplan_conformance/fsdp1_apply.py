# SPDX-License-Identifier: Apache-2.0
"""Does to a model what a strategy of the policy fsdp1 says, with PyTorch's own wrapper."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState, LowPrecisionState
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch, CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from shardplan_conformance.case import CaseError
from shardplan_conformance.units import UnitCall, matching_names, picked

_SHARDING = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "no_shard": ShardingStrategy.NO_SHARD,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
    "hybrid_shard_zero2": ShardingStrategy._HYBRID_SHARD_ZERO2,
}
_BACKWARD_PREFETCH = {
    "backward_pre": BackwardPrefetch.BACKWARD_PRE,
    "backward_post": BackwardPrefetch.BACKWARD_POST,
    "none": None,
}
_APPLIED = {
    "sharding",
    "backward_prefetch",
    "forward_prefetch",
    "limit_all_gathers",
    "use_orig_params",
    "full_precision_in_eval",
    "ignored_modules",
    "comm_hook",
    "gradient_predivide_factor",
    "gradient_postdivide_factor",
    "size_based_wrap",
    "validate_execution_order",
}
_FULL_PRECISION = "FSDP_USE_FULL_PREC_IN_EVAL"


_HOOKS = {
    "allreduce_hook": default_hooks.allreduce_hook,
    "reduce_scatter_hook": default_hooks.reduce_scatter_hook,
    "fp16_compress_hook": default_hooks.fp16_compress_hook,
    "bf16_compress_hook": default_hooks.bf16_compress_hook,
}


def _given(call: UnitCall, knobs: dict, name: str, default):
    return call.rule.get(name, knobs.get(name, default))


class AppliedFsdp1:
    """`root` is the wrapped model. `modules`: by the FQNs of the plain model."""

    def __init__(self, calls: list[UnitCall], strategy: dict, mesh: DeviceMesh, modules: dict[str, nn.Module]):
        self._strategy, self._mesh, self._modules = strategy, mesh, modules
        self._knobs = strategy.get("fsdp1", {})
        unknown = set(self._knobs) - _APPLIED
        if unknown:
            raise CaseError(f"/fsdp1/{sorted(unknown)[0]}: not something that a recording can be made of yet")
        self._no_sync = contextlib.ExitStack()
        self._summoned: dict[str, contextlib.ExitStack] = {}
        self._ignored = self._ignored_parameters()
        self._set_environment()
        order = {fqn: i for i, fqn in enumerate(modules)}  # pre-order: children come later, and are wrapped first
        self.root = modules[""]
        with self._debug_level():
            for call in sorted(calls, key=lambda call: -order[call.modules[0]]):
                self._wrap(call)
        self._set_reduction()
        for call in strategy.get("setup", []):
            self.module_call(call)

    @contextlib.contextmanager
    def _debug_level(self) -> Iterator[None]:
        """FSDP1 validates the order of execution where it was constructed with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
        before = dist.get_debug_level()
        if self._knobs.get("validate_execution_order"):
            dist.set_debug_level(dist.DebugLevel.DETAIL)
        try:
            yield
        finally:
            dist.set_debug_level(before)

    def _ignored_parameters(self) -> list[nn.Parameter]:
        wanted = set(self._strategy.get("ignored_parameters", []))
        named = self._modules[""].named_parameters(remove_duplicate=False)
        parameters = {p: None for fqn, p in named if fqn.replace("_checkpoint_wrapped_module.", "") in wanted}
        for entry in self._knobs.get("ignored_modules", []):
            for fqn in matching_names(self._modules, entry):
                parameters.update(dict.fromkeys(self._modules[fqn].parameters()))
        return list(parameters)

    def _set_environment(self) -> None:
        if self._knobs.get("full_precision_in_eval"):
            os.environ[_FULL_PRECISION] = "1"
        else:
            os.environ.pop(_FULL_PRECISION, None)

    def _set_reduction(self) -> None:
        for unit in FullyShardedDataParallel.fsdp_modules(self.root):
            for name in ("gradient_predivide_factor", "gradient_postdivide_factor"):
                if name in self._knobs:
                    setattr(unit, f"_{name}", self._knobs[name])
        hook = self._knobs.get("comm_hook", "none")
        if hook == "none":
            return
        group = self.root.process_group
        state = LowPrecisionState(group) if "compress" in hook else DefaultState(group)
        self.root.register_comm_hook(state, _HOOKS[hook])

    def _wrap(self, call: UnitCall) -> None:
        if len(call.modules) > 1:
            raise CaseError(f"/units: fsdp1 wraps single modules, not {', '.join(call.modules)} together")
        module = self._modules[call.modules[0]]
        arguments = self._arguments(call)
        if module is self.root and (sizes := self._knobs.get("size_based_wrap")) is not None:
            arguments["auto_wrap_policy"] = _size_based_policy(sizes)
        wrapped = FullyShardedDataParallel(module, **arguments)
        if module is self.root:
            self.root = wrapped
            return
        for parent in [p for p in self._modules[""].modules() if not isinstance(p, FullyShardedDataParallel)]:
            for name, child in parent._modules.items():
                if child is module:
                    parent._modules[name] = wrapped

    def _arguments(self, call: UnitCall) -> dict:
        knobs = self._knobs
        sharding = _given(call, knobs, "sharding", "full_shard")
        arguments: dict = {
            "sharding_strategy": _SHARDING[sharding],
            "backward_prefetch": _BACKWARD_PREFETCH[_given(call, knobs, "backward_prefetch", "backward_pre")],
            "forward_prefetch": _given(call, knobs, "forward_prefetch", False),
            "limit_all_gathers": knobs.get("limit_all_gathers", True),
            "use_orig_params": knobs.get("use_orig_params", False),
            "device_id": torch.device("cpu"),
        }
        if sharding.startswith("hybrid"):
            arguments["device_mesh"] = self._mesh
        if mixed := picked(call, self._strategy, "mixed_precision"):
            names = ("param_dtype", "reduce_dtype", "buffer_dtype")
            dtypes = {name: getattr(torch, mixed[name]) for name in names if name in mixed}
            arguments["mixed_precision"] = MixedPrecision(
                **dtypes,
                keep_low_precision_grads=mixed.get("keep_low_precision_grads", False),
                cast_forward_inputs=mixed.get("cast_forward_inputs", False),
                cast_root_forward_inputs=mixed.get("cast_root_forward_inputs", True),
            )
        if picked(call, self._strategy, "cpu_offload"):
            arguments["cpu_offload"] = CPUOffload(offload_params=True)
        if self._ignored:
            arguments["ignored_states"] = self._ignored
        return arguments

    def module_call(self, call: dict) -> None:
        if call["method"] == "summon_full_params":
            self._summon(call)
            return
        if call["method"] not in ("no_sync", "set_requires_gradient_sync"):
            raise CaseError(f"fsdp1 has no {call['method']}")
        entered = call.get("value", True) if call["method"] == "no_sync" else not call.get("value", True)
        self._no_sync.close()
        if entered:
            self._no_sync.enter_context(self.root.no_sync())

    def _summon(self, call: dict) -> None:
        if not call.get("value", True):
            self._summoned.pop(call["module"]).close()
            return
        flags = call.get("flags", [])
        if "offload_to_cpu" in flags:
            raise CaseError(
                "/program: summon_full_params with offload_to_cpu: PyTorch frees what it has moved where that is the "
                "CPU already"
            )
        inner = self._modules[call["module"]]
        module = next(m for m in FullyShardedDataParallel.fsdp_modules(self.root) if m.module is inner)
        stack = self._summoned[call["module"]] = contextlib.ExitStack()
        arguments = {"recurse": call.get("recurse", True), "writeback": "writeback" not in flags}
        arguments.update({flag: True for flag in flags if flag != "writeback"})
        stack.enter_context(FullyShardedDataParallel.summon_full_params(module, **arguments))


def _size_based_policy(sizes: dict) -> Callable:
    names = {"force_leaf_modules": ["MultiheadAttention"], "exclude_wrap_modules": ["ModuleList", "ModuleDict"]}
    classes = {key: {getattr(nn, name) for name in sizes.get(key, default)} for key, default in names.items()}
    return functools.partial(
        size_based_auto_wrap_policy, min_num_params=sizes.get("min_num_params", 100_000_000), **classes
    )


@contextlib.contextmanager
def runs_on_the_cpu() -> Iterator[None]:
    """Lets parameters on the host and compressing hooks work on a machine without an accelerator: memory is not pinned,
    a stream of the CPU is always done, and no memory waits for one."""
    missing = not hasattr(torch.cpu.Stream, "synchronize")
    pin_memory, record_stream = torch.Tensor.pin_memory, torch.Tensor.record_stream
    torch.Tensor.pin_memory = lambda tensor, *_args: tensor.clone()
    torch.Tensor.record_stream = lambda _tensor, _stream: None
    if missing:
        torch.cpu.Stream.synchronize = lambda _stream: None
    try:
        yield
    finally:
        torch.Tensor.pin_memory, torch.Tensor.record_stream = pin_memory, record_stream
        if missing:
            del torch.cpu.Stream.synchronize
