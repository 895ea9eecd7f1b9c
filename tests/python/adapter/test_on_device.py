# SPDX-License-Identifier: Apache-2.0
"""Training by a plan next to real FSDP on the device in software: streams, NCCL and autograd's device threads as on a
GPU. `tools/nightly --only adapter` runs many more cases."""

import json
import sys

import pytest
from conftest import ROOT, build_folder, on_device

# An accumulating case with parameters in host memory; one with an evaluation before the optimizer's step; one of FSDP2.
CASES = [
    ("flat_random.py", "44", "lazy:1"),
    ("equivalence_random.py", "0", "lazy:1"),
    ("flat_random.py", "4", "inline"),
    ("equivalence_random.py", "8", "inline"),
]


@pytest.mark.parametrize(("series", "seed", "mode"), CASES)
def test_trains_as_fsdp_does_on_cuda(series, seed, mode):
    """In inline mode the peaks of allocated memory are compared, too."""
    done = on_device(
        [sys.executable, f"tests/python/adapter/{series}", "--seed", seed, "--cases", "1"],
        mode,
        SHARDPLAN_TEST_DEVICE="cuda",
        SHARDPLAN_BUILD=str(build_folder()),
        PYTHONPATH=str(ROOT / "tools" / "python"),
    )
    assert "1 of 1 cases agree bit for bit" in done.stdout, done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize("plan", ["auto", "traced"])
def test_memory_that_is_short_is_told_beside_the_plan_and_the_step_given_up(plan, tmp_path):
    done = on_device(
        [sys.executable, "tests/python/adapter/out_of_memory.py", plan, str(tmp_path)],
        "inline",
        SHARDPLAN_TEST_DEVICE="cuda",
        SHARDPLAN_DEVICE_BYTES=str(256 << 20),
        PYTHONPATH=str(ROOT / "tools" / "python"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank, said in enumerate(json.loads(done.stdout)):
        assert [trouble["differ"] for trouble in said.values()] == ["", ""]
        instruction, operator = said["instruction"], said["operator"]
        where = "step 1, post_backward layers.2, instruction 2: allocate layers.2.reduce_scatter_input"
        assert "CUDA out of memory" in instruction["error"] and where in instruction["error"]
        assert f"rank {rank} is out of memory, {where}" in instruction["report"]
        assert (
            f"rank {rank} is out of memory, before step 1, post_forward layers.0: 134217728 bytes" in operator["report"]
        )
        for report in (instruction["report"], operator["report"]):
            assert report.count("is out of memory") == 1
            planned, found = (
                float(value) for value in report.split("peak of allocated")[1].replace("GiB", "").split()[:2]
            )
            assert 0.03 < planned < 0.1 < found < 0.25
            assert ("without operators" in report) == (plan == "auto")


def test_the_memory_of_a_longer_step_is_foreseen(tmp_path):
    done = on_device(
        [sys.executable, "tests/python/adapter/out_of_memory.py", "foreseen", str(tmp_path)],
        "inline",
        SHARDPLAN_TEST_DEVICE="cuda",
        SHARDPLAN_DEVICE_BYTES=str(512 << 20),
        PYTHONPATH=str(ROOT / "tools" / "python"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for said in json.loads(done.stdout):
        # The device in software multiplies without cuBLAS and its workspace.
        assert 0 <= said["forecast"] - said["found"] <= said["categories"]["cublas_workspace"], said
