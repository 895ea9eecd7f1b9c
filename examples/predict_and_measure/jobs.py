# SPDX-License-Identifier: Apache-2.0
"""The jobs: a model, its batch and its optimizer, for `shardplan trace jobs:demo` and for the training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn as nn
from model import Gpt, GptConfig, loss_fn
from train import load_tokens


@dataclasses.dataclass(frozen=True)
class Job:
    batch: int
    sequence: int
    vocabulary: int
    make: Callable[[], nn.Module]  # token ids -> logits
    unit: str  # as `shardplan plan --unit` has it
    optimizer: Callable[..., torch.optim.Optimizer]
    planned_optimizer: str  # ... --optimizer
    learning_rate: float
    steps: int  # that are measured in a run
    device: str = "cpu"
    reference: bool = False  # the machine is measured by it; not predicted

    def traced(self) -> tuple:
        """The callable for `shardplan trace`: model, inputs and loss."""
        ids, targets = (torch.zeros(self.batch, self.sequence, dtype=torch.long) for _ in range(2))
        return self.make(), (ids,), lambda logits: loss_fn(logits, targets)


def gpt(
    batch: int, config: GptConfig, sequence: int, adamw: bool, learning_rate: float, steps: int, reference: bool = False
) -> Job:
    """On CPU ranks the default of both optimizers is a loop over the parameters. AdamW's counts of steps are CPU
    tensors as everything else: a plan has them in device memory if it is "capturable"."""
    optimizer, planned = (torch.optim.AdamW, "adamw-forloop-capturable") if adamw else (torch.optim.SGD, "sgd-forloop")
    return Job(
        batch, sequence, config.vocabulary, lambda: Gpt(config), "blocks.*", optimizer, planned, learning_rate, steps,
        reference=reference,
    )


class Llama(nn.Module):
    def __init__(self, vocabulary: int, width: int, inner: int, layers: int, heads: int, key_value_heads: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {
            "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        }
        heads_ = {"num_attention_heads": heads, "num_key_value_heads": key_value_heads}
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                **sizes, **heads_, max_position_embeddings=8192, tie_word_embeddings=False, attn_implementation="sdpa"
            )
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.llama(input_ids=ids, use_cache=False).logits


def llama(batch: int, sequence: int, *sizes: int, reference: bool = False) -> Job:
    return Job(
        batch, sequence, sizes[0], lambda: Llama(*sizes), "llama.model.layers.*", torch.optim.AdamW, "adamw", 1e-4, 8,
        "cuda", reference,
    )


# The first two: of examples/train_gpt and tests/benchmarks/bench_adapter_gpt_step.py. References are of other sizes:
# what an operator takes amid a training, with cold caches and ranks that share cores, no loop over one operator shows.
JOBS = {
    "demo": gpt(8, GptConfig(vocabulary=load_tokens()[1]), 32, True, 3e-3, 30),
    "large": gpt(1, GptConfig(vocabulary=16_384, context=64, layers=12, heads=12, width=768), 64, False, 0.01, 6),
    "reference_small": gpt(
        4, GptConfig(vocabulary=61, context=48, layers=2, heads=2, width=24), 48, True, 3e-3, 30, reference=True
    ),
    "reference_large": gpt(
        1, GptConfig(vocabulary=8192, context=128, layers=6, heads=8, width=512), 128, False, 0.01, 8, reference=True
    ),
    "llama_1b": llama(2, 4096, 128_256, 2048, 8192, 16, 32, 8),
    "reference_llama": llama(4, 2048, 32_000, 1536, 6144, 12, 12, 12, reference=True),
}


def __getattr__(name: str) -> Callable[[], tuple]:
    """`jobs:demo` and so on."""
    if name not in JOBS:
        raise AttributeError(name)
    return JOBS[name].traced
