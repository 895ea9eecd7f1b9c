# SPDX-License-Identifier: Apache-2.0
"""torchtitan's debug models as `shardplan torchtitan` builds them, with other attentions, too: rank 0 of a fake process
group. Calls of fully_shard are noted, the trace is of the model before FSDP."""

import contextlib

from shardplan.titan.job import Job

STEP = contextlib.ExitStack()  # the step's contexts outlive the builder
CONFIGS = {
    "llama3": "llama3_debugmodel", "qwen3": "qwen3_debugmodel", "qwen3_moe": "qwen3_moe_debug",
    "deepseek_v3": "deepseek_v3_debugmodel", "gpt_oss": "gpt_oss_debugmodel_flex",
}


def titan(model, backend, batch, seq, tp=1, ep=1, cp=1, attention="flex", words=()):
    """The model, its inputs, its loss. attention: "flex", "varlen", or "sdpa", which the registry has no more."""
    job = Job(
        [
            "--module", model.removesuffix("_moe"), "--config", CONFIGS[model], "--training.local_batch_size",
            str(batch), "--training.seq_len", str(seq), "--training.disable_cuda_graphs",
            "--parallelism.spmd_backend", backend, "--parallelism.tensor_parallel_degree", str(tp),
            "--parallelism.expert_parallel_degree", str(ep), "--parallelism.context_parallel_degree", str(cp),
            *words, "activation_checkpoint:none",
        ],
        max(tp * cp, ep),
    )
    if attention != "flex":
        from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenAttention

        kind = {"sdpa": ScaledDotProductAttention, "varlen": VarlenAttention}[attention]
        for layer in job.config.model_spec.model.layers:
            layer.attention.inner_attention = kind.Config()
    STEP.enter_context(job.running())
    return job.build()


def __getattr__(name):
    """A builder by its name: model__backend__tp4_ep2__attention."""
    model, backend, degrees, attention = name.split("__")
    options = {word.rstrip("0123456789"): int(word.lstrip("abcdefghijklmnopqrstuvwxyz")) for word in degrees.split("_")}
    options.pop("whole", None)

    def build(batch, seq):
        return titan(model, backend, batch, seq, attention=attention, **options)

    return build


def compiled_loss(batch, seq):
    return titan("llama3", "spmd_types", batch, seq, tp=4, words=("--compile.enable", "--compile.components", "loss"))


def sdpa_context_parallel(batch, seq):
    return titan("llama3", "spmd_types", batch, seq, cp=4, attention="sdpa")
