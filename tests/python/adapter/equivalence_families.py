# SPDX-License-Identifier: Apache-2.0
"""Families of models from transformers, each under settings that families differ in."""

from __future__ import annotations

import dataclasses
import os

from equivalence import Case
from equivalence_models import BLOCKS
from equivalence_settings import BF16, HSDP, accumulation, case, checkpointed

FAMILIES = ("gpt", "llama", "moe", "t5", "vit")


def _of(family: str) -> list[Case]:
    blocks = BLOCKS[family]
    return [
        case(f"{family}_default_3", model=family, ranks=3),
        case(f"{family}_bf16", model=family, mixed_precision=BF16),
        case(f"{family}_hsdp_clip", model=family, ranks=4, mesh=HSDP, clip=0.1),
        case(f"{family}_accumulation", model=family, program=accumulation(), reshard_after_forward=False),
        case(f"{family}_prefetch", model=family, fsdp2={"forward_prefetch": 1, "backward_prefetch": 2}),
        dataclasses.replace(
            checkpointed(f"{family}_checkpoint", blocks, model=family, mixed_precision=BF16), optimizer="sgd"
        ),
    ]


# Another setting for each family; tools/nightly has every one.
CASES = [
    one
    for f, family in enumerate(FAMILIES)
    for s, one in enumerate(_of(family))
    if os.environ.get("SHARDPLAN_ALL_SETTINGS") or s == f
]
