# SPDX-License-Identifier: Apache-2.0
"""Llama-3.1-8B's shape and random tokens, for the scripts beside this file."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SEQUENCE = 8192


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=SEQUENCE,
        rope_theta=500_000.0,
        use_cache=False,
    )


def model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    return LlamaForCausalLM._from_config(config(), dtype=dtype)


def tokens(batch: int, sequence: int = SEQUENCE, device: str = "cuda") -> torch.Tensor:
    return torch.randint(0, 128256, (batch, sequence), device=device)
