# SPDX-License-Identifier: Apache-2.0
"""Random small models and settings of fsdp1: `python tests/python/adapter/flat_random.py --cases 300 [--seed N]` runs
many next to real FullyShardedDataParallel and says how many agree; the test suite runs some. A case is made of its
number alone.
"""

from __future__ import annotations

import functools
import random
import sys

import flat_equivalence
from equivalence import Case
from equivalence_random import layer_parts, main_of, random_arguments
from flat_settings import END, HSDP, IN_BACKWARD, case, evaluating, micro, no_sync

DTYPES = [
    None,
    None,
    {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
    {"param_dtype": "bfloat16"},
    {"reduce_dtype": "bfloat16"},
    {"param_dtype": "bfloat16", "keep_low_precision_grads": True},
]


def _freezable(shape: str, original: bool, layers: int) -> list[str]:
    """Whole units; with original parameters parts of units too."""
    units = [f"layers.{i}" for i in range(layers)] if shape == "layers" else []
    return units + (["stem", "head.bias", "scale", *layer_parts(layers)] if original else [])


def _units(draw: random.Random, shape: str, layers: int) -> list[dict]:
    units: list[dict] = []
    if shape == "nested":
        units.append({"modules": [draw.choice(["layers.*.up", "layers.*.norm"])]})
    if shape in ("layers", "nested"):
        units.append({"modules": ["layers.*"]})
    elif shape == "some":
        units += [{"modules": [f"layers.{i}"]} for i in range(layers) if draw.random() < 0.6]
    units += [{"modules": [name]} for name in ("head", "stem") if draw.random() < 0.25]
    return [*units, {"modules": [""]}]


def _program(draw: random.Random) -> dict:
    """The calls of a step: `program` and, if a forward has no gradients, `groups`."""
    kind = draw.choice(["", "", "", "accumulate", "no_sync", "evaluate"])
    if kind == "accumulate":
        count = draw.randint(2, 3)
        return {"program": [[call for number in range(count) for call in micro(number)] + END]}
    if kind == "no_sync":
        return {"program": no_sync(draw.randint(2, 3))}
    if kind == "evaluate":
        return evaluating(before=draw.random() < 0.5)
    return {}


def make_case(seed: int) -> Case:
    draw = random.Random(seed)
    ranks = draw.choice([1, 2, 2, 2, 3, 4])
    shape = draw.choice(["layers", "layers", "nested", "some", "root"])
    original = draw.random() < 0.5
    arguments = random_arguments(draw, shape == "root" or not original, functools.partial(_freezable, shape, original))
    fields: dict = {
        "use_orig_params": original, "steps": 3, "optimizer": draw.choice(["adamw", "sgd"]), **_program(draw),
    }
    shardings = ["full_shard", "full_shard", "shard_grad_op", "no_shard"]
    if ranks == 4:
        shardings += ["hybrid_shard", "hybrid_shard_zero2"]
    fields["sharding"] = draw.choice(shardings)
    if fields["sharding"].startswith("hybrid"):
        fields["mesh"] = HSDP
    units = _units(draw, shape, arguments["layers"])
    accumulates = fields.get("program", [[]])[0][:1] == micro(0)[:1] and "groups" not in fields
    if fields["sharding"] == "full_shard" and not accumulates and draw.random() < 0.15:
        units[0]["sharding"] = draw.choice(["no_shard", "shard_grad_op"])
    if (dtypes := draw.choice(DTYPES)) is not None:
        fields["mixed_precision"] = dtypes
        if "keep_low_precision_grads" in dtypes:
            fields["optimizer"] = "sgd"
            if original:
                arguments.pop("tied", None)  # raises in FSDP1 (docs/reference/python-flat.md)
        if "groups" in fields:
            fields["full_precision_in_eval"] = draw.random() < 0.6
    fields["backward_prefetch"] = draw.choice(["backward_pre", "backward_pre", "backward_post", "none"])
    fields["forward_prefetch"] = draw.random() < 0.3
    fields["limit_all_gathers"] = draw.random() < 0.7
    keeps_low = fields.get("mixed_precision", {}).get("keep_low_precision_grads", False)
    if draw.random() < 0.2 and not keeps_low:  # raises in FSDP1 (docs/reference/python-flat.md)
        fields["cpu_offload"] = True
    if original and draw.random() < 0.2 and not fields.keys() & {"program", "cpu_offload"}:
        fields["strategy_optimizer"] = IN_BACKWARD
    elif draw.random() < 0.2:
        fields["clip"] = 0.05
    if draw.random() < 0.15:
        fields["checkpoint"], fields["strategy_checkpoint"] = ("layers.*.up",), {"modules": ["layers.*.up"]}
    if draw.random() < 0.1 and not arguments.get("tied") and "mixed_precision" not in fields:
        fields["ignored_parameters"] = ["head.weight"]
    return case(f"flat{seed}", units=units, ranks=ranks, arguments=arguments, **fields)


if __name__ == "__main__":
    sys.exit(main_of(make_case, flat_equivalence.compare, __doc__))
