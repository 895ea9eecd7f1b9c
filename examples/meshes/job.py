# SPDX-License-Identifier: Apache-2.0
"""A job on three meshes: a Llama-like model with 32 experts on 64 GPUs. Attention is cut over 2 ranks (tensor
parallelism), experts over 8 (expert parallelism), and FSDP shards over all that is left.

    shardplan trace job:build --batch 2 --seq 4096

The model makes the process group of the whole job, on one CPU and without memory (torch's `fake` backend), and cuts
itself. It does not call fully_shard: that is what the plan is for.
"""

from shardplan.runs import llama

JOB = {
    "gpus": 64, "tp": 2, "ep": 8,
    "dim": 2048, "n_layers": 8, "n_heads": 16, "n_kv_heads": 4, "vocabulary": 32_000,
    "experts": 32, "top_k": 4, "ffn_hidden": 1408,
}


def build(batch, seq):
    return llama.build(JOB | {"micro_batch": batch, "sequence": seq})
