"""Training by a plan next to real FSDP on the device in software: streams, NCCL and autograd's device threads as on a GPU.
`tools/nightly --only adapter` runs many more cases."""

import sys

import pytest
from conftest import ROOT, build_folder, on_device

# An accumulating case with parameters in host memory; one with an evaluation before the optimizer's step; one of FSDP2.
CASES = [("flat_random.py", "44"), ("equivalence_random.py", "0")]


@pytest.mark.parametrize(("series", "seed"), CASES)
def test_trains_as_fsdp_does_on_cuda(series, seed):
    done = on_device(
        [sys.executable, f"tests/python/adapter/{series}", "--seed", seed, "--cases", "1"],
        "lazy:1",
        SHARDPLAN_TEST_DEVICE="cuda",
        SHARDPLAN_BUILD=str(build_folder()),
        PYTHONPATH=str(ROOT / "tools" / "python"),
    )
    assert "1 of 1 cases agree bit for bit" in done.stdout, done.stdout + done.stderr[-3000:]
