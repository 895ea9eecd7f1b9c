# SPDX-License-Identifier: Apache-2.0
"""Prints a strategy for Llama-3.1-405B with all knobs of fsdp2 that change how much there is to plan: HSDP, mixed
precision, offload, checkpointing, a prefetch list for every layer, rules by unit, and four micro-batches that
accumulate without synchronisation.

    python tests/benchmarks/all_knobs_405b.py RANKS > strategy.json
    shardplan plan trace.json --cluster tools/clusters/h100_sxm_RANKS.json --strategy strategy.json -o plan.json
"""

import json
import sys

LAYERS, MICROBATCHES = 126, 4
names = [f"model.layers.{i}" for i in range(LAYERS)]


def rule(index: int) -> dict:
    low = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16" if index % 3 == 0 else "float32"}
    return {"modules": [names[index]], "reshard_after_forward": [True, False, 2][index % 3], "mixed_precision": low}


def setter(method: str, value: bool) -> dict:
    return {"call": "module", "method": method, "module": "", "value": value}


def program() -> list[dict]:
    calls = []
    for m in range(MICROBATCHES):
        last = m + 1 == MICROBATCHES
        calls += [setter("set_requires_gradient_sync", last), setter("set_is_last_backward", last)]
        calls += [{"call": "forward", "microbatch": m}, {"call": "backward", "microbatches": [m]}]
    return [*calls, {"call": "optimizer_step"}, {"call": "zero_grad"}]


def strategy(ranks: int) -> dict:
    return {
        "schema": "shardplan.strategy/1",
        "policy": "fsdp2",
        "mesh": [{"name": "replicate", "size": ranks // 4}, {"name": "shard", "size": 4}],
        "units": [*map(rule, range(LAYERS)), {"modules": ["model.norm", "lm_head"], "group": True}, {"modules": [""]}],
        "mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
        "cpu_offload": True,
        "checkpoint": {"modules": ["model.layers.*"]},
        "fsdp2": {
            "forward_prefetch_lists": [{"unit": n, "prefetch": names[i + 1 : i + 3]} for i, n in enumerate(names)],
            "backward_prefetch_lists": [
                {"unit": n, "prefetch": names[max(0, i - 2) : i][::-1]} for i, n in enumerate(names)
            ],
        },
        "program": [program()],
    }


if __name__ == "__main__":
    print(json.dumps(strategy(int(sys.argv[1])), indent=1))
