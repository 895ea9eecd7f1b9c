# SPDX-License-Identifier: Apache-2.0
"""A rank of torchtitan's own trainer on a CPU: its model, parallelization, loss, clipping and optimizer. Stand-ins for
what CPUs and Gloo lack are the same under FSDP2 and by a plan."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import types
import unittest.mock
import warnings

import torch
import torch.distributed as dist

STEPS = 3
BATCH, SEQ = 2, 512


def trained(words: list[str]) -> dict[str, dict]:
    """"fsdp2" and "plan": what a training of these arguments of torchtitan shows on this rank."""
    warnings.simplefilter("ignore")
    _import_for_cpus()
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan's init_distributed
    with _of_cpus_and_gloo():
        return {"fsdp2": _train(words, by_plan=False), "plan": _train(words, by_plan=True)}


def _import_for_cpus() -> None:
    """torchtitan asks which device there is when it is imported."""
    import torch._utils

    from shardplan.titan import absent

    absent.stand_in()
    with unittest.mock.patch.object(torch._utils, "_get_available_device_type", lambda: "cpu"):
        import torchtitan.trainer  # noqa: F401


def _of_cpus_and_gloo() -> contextlib.ExitStack:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives
    from torch.nn.attention import flex_attention
    from torchtitan.distributed import utils as distributed
    from torchtitan.models.common import attention
    from torchtitan.tools import utils

    sums = types.SimpleNamespace(SUM=dist.ReduceOp.SUM, AVG=dist.ReduceOp.AVG, PREMUL_SUM=_multiplied_by_one)
    device = types.SimpleNamespace(**{name: getattr(torch.cpu, name) for name in ("current_device", "synchronize")})
    device.set_device = lambda _: None
    patches = [
        (_fsdp_collectives, "ReduceOp", sums),
        (dist, "all_to_all", _all_to_all_of(dist.all_to_all)),
        (flex_attention, "_validate_device", lambda *_: None),  # its backward is for GPUs; unfused it is operators
        (attention.FlexAttention, "_compiled_flex_attn", staticmethod(flex_attention.flex_attention)),
        (utils, "device_module", device),
        (utils, "get_local_device", lambda: torch.device("cpu")),
        (utils, "get_peak_flops", lambda _: 1.0),
        (distributed, "set_pg_timeouts", lambda **_: None),  # a barrier of GPUs
    ]
    stack = contextlib.ExitStack()
    for owner, name, value in patches:
        stack.enter_context(unittest.mock.patch.object(owner, name, value))
    return stack


def _multiplied_by_one(factor: float) -> dist.ReduceOp.RedOpType:
    assert factor == 1.0, "torchtitan sets the divide factor to 1"
    return dist.ReduceOp.SUM


def _all_to_all_of(exchange):
    """Gloo exchanges equal parts: these are padded."""

    def all_to_all(outputs, inputs, group=None, async_op=False):
        rows = torch.tensor(max(part.shape[0] for part in (*outputs, *inputs)))
        dist.all_reduce(rows, op=dist.ReduceOp.MAX, group=group)
        sent = [part.new_zeros((int(rows), *part.shape[1:])) for part in inputs]
        got = [part.new_zeros((int(rows), *part.shape[1:])) for part in outputs]
        for padded, part in zip(sent, inputs):
            padded[: part.shape[0]] = part
        exchange(got, sent, group=group)
        for padded, part in zip(got, outputs):
            part.copy_(padded[: part.shape[0]])

    return all_to_all


class _Tokens:
    """Batches of a data-parallel rank."""

    def __init__(self, vocabulary: int, rank: int, batch: int, seq: int) -> None:
        self._vocabulary, self._rank, self._shape = vocabulary, rank, (batch, seq + 1)

    def __iter__(self):
        generator = torch.Generator().manual_seed(100 + self._rank)
        while True:
            tokens = torch.randint(self._vocabulary, self._shape, generator=generator)
            inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            yield {"input": inputs, "positions": torch.arange(inputs.shape[1]).expand_as(inputs).contiguous()}, labels


class _Metrics:
    """torchtitan's MetricsProcessor, as far as its trainer asks it."""

    color = types.SimpleNamespace(blue="", red="", reset="", green="", cyan="")
    peak = types.SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)

    def __init__(self) -> None:
        self.steps: list[tuple] = []
        self.ntokens_since_last_log, self.data_loading_times = 0, []
        self.device_memory_monitor = types.SimpleNamespace(device_name="cpu", get_peak_stats=lambda: self.peak)

    def should_log(self, _step: int) -> bool:
        return True

    def log(self, step: int, loss: float, largest_loss: float, norm: float, **_) -> None:
        self.steps.append((step, loss, largest_loss, norm))


def _train(words: list[str], by_plan: bool) -> dict:
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed import utils as distributed
    from torchtitan.trainer import Trainer

    from shardplan.integrations import use_plans

    with unittest.mock.patch.object(sys, "argv", ["torchtitan"]):
        config = ConfigManager().parse_args(
            [
                *words, "--training.steps", str(STEPS), "--training.local_batch_size", str(BATCH), "--training.seq_len",
                str(SEQ), "--training.disable_cuda_graphs", "--debug.seed", "42",
            ]
        )
    metrics, model = _Metrics(), config.model_spec.model
    model.layers = _few(model.layers)
    config.metrics = types.SimpleNamespace(build=lambda **_: metrics)
    config.tokenizer = types.SimpleNamespace(build=lambda **_: None)
    config.dataloader = types.SimpleNamespace(
        build=lambda dp_rank, local_batch_size, seq_len, **_: _Tokens(
            model.vocab_size, dp_rank, local_batch_size, seq_len
        )
    )
    config.validator.enable = False
    if by_plan:
        use_plans(config, plans=None)
    trainer = Trainer(config)
    module, gradients = trainer.model_parts[0], []

    def clip(parameters, *arguments, **more):
        gradients.append({name: _digest(p.grad) for name, p in module.named_parameters() if p.grad is not None})
        return clip_grad_norm(parameters, *arguments, **more)

    clip_grad_norm = distributed.clip_grad_norm_
    with unittest.mock.patch.object(distributed, "clip_grad_norm_", clip), unittest.mock.patch("time.sleep"):
        trainer.train()
    return {
        "steps": metrics.steps,
        "gradients": gradients,
        "parameters": {name: _digest(p) for name, p in module.named_parameters()},
        "placements": {
            name: (p.device_mesh.mesh_dim_names, p.device_mesh.mesh.tolist(), p.placements, tuple(p.shape))
            for name, p in module.named_parameters()
        },
        **({"planned": _planned(module)} if by_plan else {}),
    }


def _few(layers: list) -> list:
    """Two of them: with experts where there are some, and one without where there are both."""
    experts = [layer for layer in layers if getattr(layer, "moe", None) is not None]
    dense = [layer for layer in layers if getattr(layer, "moe", None) is None]
    return (dense[:1] + experts[:1]) if dense and experts else layers[:2]


def _digest(tensor: torch.Tensor) -> str:
    local = tensor.to_local().detach().contiguous()
    return hashlib.sha256(local.view(torch.uint8).numpy().tobytes()).hexdigest()


def _planned(model: torch.nn.Module) -> dict:
    from shardplan.torch._replay.applied import applied_to

    applied = applied_to(model)
    return {
        "deviation": applied.runtime.deviation,
        "unplannable": applied.following.unplannable_because,
        "groups": [(unit.fqn, unit.parameter_group, len(unit.parameters)) for unit in applied.plan.units],
    }
