# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own allocator under real FSDP2 and FSDP1, on a device on which nothing computes (docs/internals/device.md),
next to what `shardplan memory` says."""

import pytest
from memory_random import difference

CASES = {
    "64 ranks, accumulated": {
        "world": 64, "seq": 384, "accum": 2, "accum_sync": False, "opt": "fused", "mp": "bf16_bf16",
    },
    "64 ranks, accumulated and widened": {"world": 64, "seq": 384, "accum": 2, "accum_sync": False, "opt": "fused"},
    "fp32": {"world": 4, "seq": 640, "batch": 2, "mp": "fp32", "attn": "repeat"},
    "fsdp1, checkpointed": {"policy": "fsdp1", "seq": 384, "ac": "block", "device": "slow"},
    "fsdp1, sums of several blocks, checkpointed": {
        "policy": "fsdp1", "seq": 2048, "norm": "manual", "ac": "block", "mp": "fp32", "attn": "repeat",
    },
    "fsdp1, a loop over parameters": {
        "policy": "fsdp1", "seq": 64, "opt": "for_loop", "sharding": "shard_grad_op", "device": "slow",
    },
    "fsdp1, steps before those that repeat": {
        "policy": "fsdp1", "seq": 64, "world": 8, "replicate": 2, "sharding": "hybrid_shard_zero2", "device": "slow",
    },
    "fsdp1, segments that expand": {"policy": "fsdp1", "seq": 384, "alloc_conf": "expandable_segments:True"},
    "segments that expand": {"seq": 384, "alloc_conf": "expandable_segments:True"},
    "fsdp1, accumulated without synchronisation": {
        "policy": "fsdp1", "seq": 384, "accum": 3, "accum_sync": False, "device": "slow",
    },
}


@pytest.mark.parametrize("name", CASES)
def test_rows_and_peaks_are_those_of_the_real_allocator(name, tmp_path):
    assert difference({"case": name, "model": {}, "knobs": CASES[name]}, tmp_path) == ""
