# SPDX-License-Identifier: Apache-2.0
"""Training by an fsdp1 plan next to real FullyShardedDataParallel: the strategy document of a Case (equivalence.py)
read by `shardplan plan` and by `with_fsdp1` below, which makes the wraps that the document stands for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.nn as nn
from adapter_workers import DEVICE
from equivalence import DEFAULT_PROGRAM, Case, Trainer, compare_training, make_mesh, make_model, modules_named
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.utils import _free_storage

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


# ---- real FSDP1 by a strategy document ----


def _dtype(name: str | None) -> torch.dtype | None:
    return name and getattr(torch, name)


def _precision(fields: dict | None):
    from torch.distributed.fsdp import MixedPrecision

    if fields is None:
        return None
    fields = dict(fields)
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        fields[name] = _dtype(fields.get(name))
    return MixedPrecision(**fields)


def _options(case: Case, rule: dict, model: nn.Module, mesh) -> dict:
    from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, ShardingStrategy

    knobs = case.strategy.get("fsdp1", {})
    strategies = {
        "full_shard": ShardingStrategy.FULL_SHARD,
        "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
        "no_shard": ShardingStrategy.NO_SHARD,
        "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
        "hybrid_shard_zero2": ShardingStrategy._HYBRID_SHARD_ZERO2,
    }
    prefetch = {
        "backward_pre": BackwardPrefetch.BACKWARD_PRE,
        "backward_post": BackwardPrefetch.BACKWARD_POST,
        "none": None,
    }
    hybrid = mesh.ndim == 2
    groups = (mesh.get_group(1), mesh.get_group(0)) if hybrid else mesh.get_group(0)
    by_name = {clean(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    return {
        "process_group": groups,
        "device_id": torch.device(DEVICE, torch.cuda.current_device()) if DEVICE == "cuda" else torch.device(DEVICE),
        "sharding_strategy": strategies[rule.get("sharding") or knobs.get("sharding", "full_shard")],
        "backward_prefetch": prefetch[knobs.get("backward_prefetch", "backward_pre")],
        "forward_prefetch": knobs.get("forward_prefetch", False),
        "limit_all_gathers": knobs.get("limit_all_gathers", True),
        "use_orig_params": knobs.get("use_orig_params", False),
        "mixed_precision": _precision(rule.get("mixed_precision") or case.strategy.get("mixed_precision")),
        "cpu_offload": CPUOffload(True) if case.strategy.get("cpu_offload") else None,
        "ignored_states": [by_name[fqn] for fqn in case.strategy.get("ignored_parameters", [])] or None,
    }


@contextlib.contextmanager
def gradients_in_host_memory() -> Iterator[None]:
    """FSDP1 on the CPU with parameters offloaded does with gradients what it does on a GPU.

    Behind a forward it shows the offloaded gradient of the last step again (_flat_param.py:2575), and takes one on its
    own device for a gradient to add to (_flat_param.py:1635). On a GPU that one is never on its device, and is let go.
    """
    prepare = FlatParamHandle.prepare_gradient_for_backward

    def would_be_in_host_memory(handle) -> bool:
        parameter = handle.flat_param
        if not handle._offload_params or parameter.grad is None:
            return False
        if handle.uses_sharded_strategy:
            return parameter.grad.size() == parameter._local_shard.size()
        return parameter.grad.data_ptr() == parameter._cpu_grad.data_ptr()

    def prepare_offloaded(handle) -> None:
        if would_be_in_host_memory(handle):
            handle.flat_param.grad = None
        prepare(handle)

    FlatParamHandle.prepare_gradient_for_backward = prepare_offloaded
    try:
        yield
    finally:
        FlatParamHandle.prepare_gradient_for_backward = prepare


@contextlib.contextmanager
def copies_kept_while_they_are_read() -> Iterator[None]:
    """Under NO_SHARD with offload the copy of a parameter on the device is what its modules compute with, in memory of
    the stream that copies. FSDP1 drops it behind a forward and tells the allocator nothing of the stream that computes
    (`_use_sharded_flat_param`), so the next copy may be written over it while it is read."""
    original = FlatParamHandle._use_sharded_flat_param

    def recorded(handle: FlatParamHandle) -> None:
        if handle.flat_param.data.is_cuda:
            handle.flat_param.data.record_stream(torch.cuda.current_stream())
        original(handle)

    FlatParamHandle._use_sharded_flat_param = recorded
    try:
        yield
    finally:
        FlatParamHandle._use_sharded_flat_param = original


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Makes FSDP1 do on the CPU what it does on a GPU; on a GPU it keeps FSDP1's copies."""
    from shardplan_conformance.fsdp1_apply import runs_on_the_cpu

    if DEVICE != "cpu":
        with copies_kept_while_they_are_read():
            yield
        return
    with runs_on_the_cpu(), gradients_in_host_memory():
        yield


def with_fsdp1(case: Case, model: nn.Module, mesh) -> nn.Module:
    """FullyShardedDataParallel for every unit of the strategy, the innermost first, and the root."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    full_precision = case.strategy.get("fsdp1", {}).get("full_precision_in_eval", False)
    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1" if full_precision else "0"
    options: dict[nn.Module, dict] = {}
    for rule in case.strategy["units"]:
        for entry in rule["modules"]:
            for module in modules_named(model, entry):
                options.setdefault(module, _options(case, rule, model, mesh))
    parents = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    for parent, name, child in reversed(parents):
        if child in options:
            setattr(parent, name, FSDP(child, **options[child]))
    return FSDP(model, **options.get(model, _options(case, {}, model, mesh)))


class Fsdp1Calls:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.context = model, None

    def __call__(self, call: dict) -> None:
        assert call["method"] == "no_sync", call
        if call["value"]:
            self.context = self.model.no_sync()
            self.context.__enter__()
        else:
            self.context.__exit__(None, None, None)
            self.context = None


class PlanCalls:
    """no_sync is in the plan."""

    def __init__(self, model: nn.Module) -> None:
        self.context = None

    def __call__(self, call: dict) -> None:
        self.context = call["value"] or None


# ---- a training loop ----


def steps_in_backward(case: Case) -> bool:
    return case.strategy.get("optimizer", {}).get("in_backward", False)


def give_optimizers(model: nn.Module) -> nn.Module:
    """Every parameter its own, which FSDP1 and the adapter step in the backward."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    trained = [p for p in model.parameters() if p.requires_grad]
    _apply_optimizer_in_backward(torch.optim.SGD, trained, {"lr": 0.1, "momentum": 0.9}, register_hook=False)
    return model


class FlatTrainer(Trainer):
    """synchronizes: whether the loop waits for the device before the optimizer steps offloaded parameters, as FSDP1
    needs it."""

    def __init__(self, case: Case, model: nn.Module, calls, clip, synchronizes: bool = False) -> None:
        super().__init__(case, model, calls)
        self.clip = clip
        self.synchronizes = synchronizes and DEVICE == "cuda" and case.strategy.get("cpu_offload", False)

    def program(self) -> list[list[dict]]:
        return [DEFAULT_PROGRAM[0][:2]] if steps_in_backward(self.case) else super().program()

    def forward(self, number: int, place: str, call: dict, seen: dict) -> None:
        self.model.train(call.get("training", self.has_grad(call)))
        super().forward(number, place, call, seen)

    def backward(self, number: int, place: str, call: dict, seen: dict) -> None:
        losses = [self.losses.pop(microbatch) for microbatch in call.get("microbatches", [0])]
        sum(losses[1:], losses[0]).backward()
        if self.calls.context is not None:
            return  # FSDP1 shows unreduced gradients under no_sync
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and parameter.grad.numel() > 0:
                seen[f"{place}: gradient of {clean(name)}"] = parameter.grad.detach().clone()
            if steps_in_backward(self.case):
                seen[f"{place}: {clean(name)}"] = parameter.detach().clone()

    def optimizer_step(self, number: int, place: str, call: dict, seen: dict) -> None:
        if self.case.clip is not None:
            seen[f"{place}: gradient norm"] = self.clip(self.model, self.case.clip)
        if self.synchronizes:
            torch.cuda.synchronize()
        self.optimizer.step()
        for name, parameter in self.model.named_parameters():
            seen[f"{place}: {clean(name)}"] = parameter.detach().clone()


def _fsdp1_clip(model: nn.Module, norm: float) -> torch.Tensor:
    return model.clip_grad_norm_(norm)


def _plan_clip(model: nn.Module, norm: float) -> torch.Tensor:
    import shardplan.torch as sp

    return sp.clip_grad_norm_(model, norm)


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter in its own shape, of either kind of model."""
    import shardplan.torch as sp
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    summon = FSDP.summon_full_params if isinstance(model, FSDP) else sp.summon_full_params
    for unit in FSDP.fsdp_modules(model):
        # Behind a forward without gradients FSDP1's root stays gathered, and is what it would show and write back,
        # whatever an optimizer has done since.
        for name in ("_full_param_padded", "_full_prec_full_param_padded"):
            if unit._handle is not None and hasattr(unit._handle.flat_param, name):
                _free_storage(getattr(unit._handle.flat_param, name))
    with summon(model):
        return {clean(name): p.detach().clone() for name, p in model.named_parameters()}


def compare(case: Case, plan: str) -> tuple[float, str]:
    """On a rank: the adapter next to FSDP1."""
    import shardplan.torch as sp

    mesh = make_mesh(case)
    prepare = give_optimizers if steps_in_backward(case) else lambda model: model
    with as_on_a_gpu():
        ours_model = sp.apply(prepare(make_model(case)), plan, mesh)
        theirs_model = with_fsdp1(case, prepare(make_model(case)), mesh)
        ours = FlatTrainer(case, ours_model, PlanCalls(ours_model), _plan_clip)
        theirs = FlatTrainer(case, theirs_model, Fsdp1Calls(theirs_model), _fsdp1_clip, synchronizes=True)
        return compare_training(case, ours, theirs, whole_parameters)
