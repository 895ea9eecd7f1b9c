"""Training by an fsdp1 plan next to real FullyShardedDataParallel: the strategy document of a Case (equivalence.py) read by
`shardplan plan` and by `with_fsdp1` below, which makes the wraps that the document stands for."""

from __future__ import annotations

import torch
import torch.nn as nn
from equivalence import Case, Trainer, compare_training, make_mesh, make_model, modules_named

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
        "device_id": torch.device("cpu"),
        "sharding_strategy": strategies[rule.get("sharding") or knobs.get("sharding", "full_shard")],
        "backward_prefetch": prefetch[knobs.get("backward_prefetch", "backward_pre")],
        "forward_prefetch": knobs.get("forward_prefetch", False),
        "limit_all_gathers": knobs.get("limit_all_gathers", True),
        "use_orig_params": knobs.get("use_orig_params", False),
        "mixed_precision": _precision(rule.get("mixed_precision") or case.strategy.get("mixed_precision")),
        "cpu_offload": CPUOffload(True) if case.strategy.get("cpu_offload") else None,
        "ignored_states": [by_name[fqn] for fqn in case.strategy.get("ignored_parameters", [])] or None,
    }


def with_fsdp1(case: Case, model: nn.Module, mesh) -> nn.Module:
    """FullyShardedDataParallel for every unit of the strategy, the innermost first, and the root."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

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


class FlatTrainer(Trainer):
    def __init__(self, case: Case, model: nn.Module, calls, clip) -> None:
        super().__init__(case, model, calls)
        self.clip = clip

    def backward(self, number: int, place: str, call: dict, seen: dict) -> None:
        losses = [self.losses.pop(microbatch) for microbatch in call.get("microbatches", [0])]
        sum(losses[1:], losses[0]).backward()
        if self.calls.context is not None:
            return  # FSDP1 shows unreduced gradients under no_sync
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and parameter.grad.numel() > 0:
                seen[f"{place}: gradient of {clean(name)}"] = parameter.grad.detach().clone()

    def optimizer_step(self, number: int, place: str, call: dict, seen: dict) -> None:
        if self.case.clip is not None:
            seen[f"{place}: gradient norm"] = self.clip(self.model, self.case.clip)
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
    with summon(model):
        return {clean(name): p.detach().clone() for name, p in model.named_parameters()}


def compare(case: Case, plan: str) -> tuple[float, str]:
    """On a rank: the adapter next to FSDP1."""
    import shardplan.torch as sp

    mesh = make_mesh(case)
    ours_model = sp.apply(make_model(case), plan, mesh)
    theirs_model = with_fsdp1(case, make_model(case), mesh)
    ours = FlatTrainer(case, ours_model, PlanCalls(ours_model), _plan_clip)
    theirs = FlatTrainer(case, theirs_model, Fsdp1Calls(theirs_model), _fsdp1_clip)
    return compare_training(case, ours, theirs, whole_parameters)
