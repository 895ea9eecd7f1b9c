# SPDX-License-Identifier: Apache-2.0
"""torchtitan's models as its own trainer builds, parallelizes and calls them, without FSDP: rank 0 of a fake process
group."""

import contextlib
import importlib
import sys
import types
import unittest.mock

import torch
from tracer_distributed import join

STEP = contextlib.ExitStack()  # the step's contexts outlive the builder


def config_of(family, flavor, attention):
    """(torchtitan's ModelSpec, its config); attention: "flex", "varlen", or "sdpa", which its registry has no more."""
    registry = importlib.import_module(f"torchtitan.models.{family}").model_registry
    spec = registry(flavor, attn_backend="flex" if attention == "sdpa" else attention)
    if attention == "sdpa":
        from torchtitan.models.common.attention import ScaledDotProductAttention

        for layer in spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec, spec.model


def titan(family, flavor, backend, batch, seq, tp=1, ep=1, cp=1, world=None, attention="sdpa", compiled_loss=False):
    """The model, its inputs, its loss. Every rank beyond tp x cp is data parallel."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input
    from torchtitan.distributed.spmd_types import annotate_input_spmd_types
    from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend

    set_spmd_backend(backend)
    world = world or max(tp * cp, ep)
    join(world)
    parallelism = ParallelismConfig(
        tensor_parallel_degree=tp, expert_parallel_degree=ep, context_parallel_degree=cp, spmd_backend=backend,
        context_parallel_load_balancer=None,
    )
    spec, config = config_of(family, flavor, attention)
    with without_trainer():
        config.update_from_config(config=types.SimpleNamespace(parallelism=parallelism))
    with torch.device("meta"):
        model = config.build()
    dims = ParallelDims.from_config(parallelism, world)
    dims.build_mesh()
    if world > 1:
        with without_fsdp(spec.parallelize_fn):
            spec.parallelize_fn(
                model, parallel_dims=dims, training=TrainingConfig(), parallelism=parallelism,
                compile_config=CompileConfig(enable=False), ac_config=None, dump_folder="",
            )
    tokens = torch.zeros(batch, seq, dtype=torch.long, device="cuda")
    labels = torch.zeros(batch, seq, dtype=torch.long, device="cuda")
    more = {"positions": torch.arange(seq, device="cuda").expand(batch, seq)}
    if attention != "sdpa":
        more["attention_masks"] = model.get_attention_masks(positions=more["positions"])
    if dims.cp_enabled:
        tokens, labels, more = prepare_context_parallel_input(
            tokens, labels, more, dims.get_mesh("cp"), torch.device("cuda"), None, None
        )
    if backend == "spmd_types" and world > 1:
        tokens, labels, more = annotate_input_spmd_types(dims, tokens, labels, more)
    if world > 1:
        STEP.enter_context(get_spmd_context(parallel_dims=dims)())
    loss = CrossEntropyLoss(
        CrossEntropyLoss.Config(global_vocab_size=config.vocab_size),
        compile_config=CompileConfig(enable=compiled_loss, components=["loss"]),
    )
    return model, {"tokens": tokens, **more}, lambda output: loss(output, labels)[0]


def without_trainer():
    """update_from_config asks for the trainer's class, whose module needs the packages of data loading."""
    trainer = types.ModuleType("torchtitan.trainer")
    trainer.Trainer = types.SimpleNamespace(Config=type("Config", (), {}))
    return unittest.mock.patch.dict(sys.modules, {"torchtitan.trainer": trainer})


@contextlib.contextmanager
def without_fsdp(parallelize):
    """A trace is of the model before FSDP."""
    module = sys.modules[parallelize.__module__]
    with contextlib.ExitStack() as stack:
        for name in dir(module):
            if name.startswith("apply_fsdp_to"):
                stack.enter_context(unittest.mock.patch.object(module, name, lambda *_, **__: None))
        yield


def __getattr__(name):
    """A builder by its name: family__flavor__backend__tp4_ep2__attention."""
    family, flavor, backend, degrees, attention = name.split("__")
    options = {word.rstrip("0123456789"): int(word.lstrip("abcdefghijklmnopqrstuvwxyz")) for word in degrees.split("_")}
    options.pop("whole", None)

    def build(batch, seq):
        return titan(family, flavor, backend, batch, seq, attention=attention, **options)

    return build


def compiled_loss(batch, seq):
    """compile.components is ["loss"]."""
    return titan("llama3", "debugmodel", "spmd_types", batch, seq, tp=4, attention="flex", compiled_loss=True)


def sdpa_context_parallel(batch, seq):
    return titan("llama3", "debugmodel", "spmd_types", batch, seq, cp=4)
