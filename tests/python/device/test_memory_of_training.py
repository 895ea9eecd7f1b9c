"""PyTorch's own allocator under real FSDP2 and FSDP1, on a device on which nothing computes (docs/device.md), next to what `shardplan memory` says."""

import pytest
from memory_random import difference

CASES = {
    "64 ranks, accumulated": {"world": 64, "seq": 384, "accum": 2, "accum_sync": False, "opt": "fused"},
    "fp32": {"world": 4, "seq": 640, "batch": 2, "mp": "fp32", "attn": "repeat"},
    "fsdp1, checkpointed": {"policy": "fsdp1", "seq": 384, "ac": "block", "device": "slow"},
    "fsdp1, accumulated without synchronisation": {"policy": "fsdp1", "seq": 384, "accum": 3, "accum_sync": False, "device": "slow"},
}


@pytest.mark.parametrize("name", CASES)
def test_peaks_are_those_of_the_real_allocator(name, tmp_path):
    assert difference({"case": name, "model": {}, "knobs": CASES[name]}, tmp_path) == ""
