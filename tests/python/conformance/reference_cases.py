# SPDX-License-Identifier: Apache-2.0
"""Cases in the form of the recordings of FSDP1 that the given recordings do not have. They are encoder-decoders, whose
decoder's blocks all read one tensor and pass the position bias through, and checkpoints around and inside units.
`python -m reference_recorder reference_cases:cases FOLDER` records them."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from reference_models import Block1, Linear2
from shardplan_conformance import Case, Forward

TOKENS = torch.zeros(2, 8, dtype=torch.long)


def t5(layers: int = 2, **more) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {
        "vocab_size": 48, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_layers": layers,
        "num_decoder_layers": layers,
    }
    return T5ForConditionalGeneration(
        T5Config(**sizes, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, **more)
    )


class EncoderDecoder(nn.Module):
    """`order`: in which the decoder's layers run; a layer may run twice."""

    def __init__(self, order=(0, 1)):
        super().__init__()
        sizes = {"d_model": 16, "nhead": 2, "dim_feedforward": 24, "dropout": 0.0, "batch_first": True}
        self.embed = nn.Embedding(48, 16)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(**sizes) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(**sizes) for _ in range(max(order) + 1))
        self.head, self.order = nn.Linear(16, 48), order

    def forward(self, tokens):
        memory = hidden = self.embed(tokens)
        for layer in self.encoder:
            memory = layer(memory)
        for index in self.order:
            hidden = self.decoder[index](hidden, memory)
        return self.head(hidden)


class SelfCross(nn.Module):
    """A block that gets one tensor as both of its inputs, and one that returns one tensor twice."""

    def __init__(self):
        super().__init__()
        self.stem, self.mix, self.head = Linear2(8, 8), Mix(), Linear2(8, 8)

    def forward(self, x):
        x = self.stem(x)
        first, second = self.mix(x, x)
        return self.head(first + second)


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y):
        z = self.a(x) + self.b(y)
        return z, z


class Stages(nn.Module):
    """Stages of blocks. `around`: what a checkpoint of the model's own is around."""

    def __init__(self, around: str = "nothing", early_stop: bool = True):
        super().__init__()
        self.stem = nn.Linear(32, 32)
        self.stages = nn.ModuleList(nn.Sequential(Block1(), Block1()) for _ in range(2))
        self.head, self.around, self.early_stop = nn.Linear(32, 8), around, early_stop

    def forward(self, x):
        x = self.stem(x)
        if self.around == "nothing":
            return self.head(self._stages(x))
        with set_checkpoint_early_stop(self.early_stop):
            return self.head(self._stages(x))

    def _stages(self, x):
        for stage in self.stages:
            parts = {"nothing": [], "stage": [stage], "block": list(stage)}[self.around]
            for part in parts:
                x = checkpoint(part, x, use_reentrant=False)
            x = x if parts else stage(x)
        return x


def _case(
    name: str,
    policy: str,
    model,
    units: list[str],
    forward: Forward,
    ranks: int = 2,
    checkpoint: dict | None = None,
    **knobs,
) -> Case:
    rules = [{"modules": [unit]} for unit in [*units, ""]]
    strategy: dict = {"policy": policy, "units": rules, policy: knobs, "optimizer": {"kind": "sgd"}}
    if checkpoint:
        strategy["checkpoint"] = checkpoint
    return Case(model, [forward], strategy, ranks=ranks, name=f"{name}_{policy}")


def cases() -> list[Case]:
    return [*encoder_decoders(), *checkpoints()]


def encoder_decoders() -> list[Case]:
    labelled = Forward((), {"input_ids": TOKENS, "labels": TOKENS})
    blocks = ["encoder.block.*", "decoder.block.*"]
    layers = ["encoder.*", "decoder.*"]
    bpost = {"sharding": "shard_grad_op", "backward_prefetch": "backward_post"}
    ahead = {"forward_prefetch": True, "use_orig_params": True}
    found = [
        _case("t5_zero2_bpost", "fsdp1", t5, blocks, labelled, **bpost),
        _case("t5_fprefetch_w3", "fsdp1", lambda: t5(3), blocks, labelled, ranks=3, **ahead),
        _case("t5_nested_bnone", "fsdp1", t5, ["decoder.block.*.layer.*", *blocks], labelled, backward_prefetch="none"),
    ]
    for policy in ("fsdp1", "fsdp2"):
        found += [
            _case("t5", policy, t5, blocks, labelled),
            _case("encdec", policy, EncoderDecoder, layers, Forward((TOKENS,))),
            _case("encdec_reused", policy, lambda: EncoderDecoder((0, 1, 0)), layers, Forward((TOKENS,))),
            _case("same_tensor_twice", policy, SelfCross, ["stem", "mix"], Forward((torch.zeros(2, 8),))),
        ]
    return found


def checkpoints() -> list[Case]:
    x = Forward((torch.zeros(2, 4, 32),))
    blocks = ["stages.*.*"]
    found = [
        _case("ckpt_stage_is_unit", "fsdp1", Stages, [*blocks, "stages.*"], x, checkpoint={"modules": ["stages.*"]})
    ]
    found.append(_case("ckpt_call_around_block", "fsdp1", functools.partial(Stages, "block"), blocks, x))
    for early_stop, name in ((True, ""), (False, "_nostop")):
        for around in ("stage", "block"):
            make = functools.partial(Stages, around, early_stop)
            found.append(_case(f"ckpt_call_around_{around}{name}", "fsdp2", make, blocks, x))
        wrapped = {"modules": ["stages.*"], "early_stop": early_stop}
        found.append(_case(f"ckpt_stage_is_unit{name}", "fsdp2", Stages, [*blocks, "stages.*"], x, checkpoint=wrapped))
        found.append(_case(f"ckpt_stages{name}", "fsdp2", Stages, blocks, x, checkpoint=wrapped))
        found.append(
            _case(
                f"ckpt_call_in_unit{name}",
                "fsdp2",
                functools.partial(Stages, "block", early_stop),
                [*blocks, "stages.*"],
                x,
            )
        )
    return found
