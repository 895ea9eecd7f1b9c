# SPDX-License-Identifier: Apache-2.0
"""sp.Muon on the device in software: streams and NCCL as on a GPU, and torchtitan's DistMuon beside it."""

import json
import random
import sys

import pytest
from conftest import ROOT, build_folder, on_device


def on_cuda(mode: str, program: str, *arguments: object):
    return on_device(
        [sys.executable, f"tests/python/muon/{program}", *map(str, arguments)],
        mode,
        SHARDPLAN_TEST_DEVICE="cuda",
        SHARDPLAN_BUILD=str(build_folder()),
        PYTHONPATH=str(ROOT / "tools" / "python"),
    )


@pytest.mark.parametrize("mode", ["inline", "lazy"])
def test_drawn_cases_equal_one_process(mode):
    seed = random.randrange(1 << 16)
    done = on_cuda(f"lazy:{seed}" if mode == "lazy" else mode, "muon_ranks.py", "--seed", seed, "--cases", 4)
    assert f"seed {seed}: 4 cases agree bit for bit" in done.stdout, done.stdout + done.stderr[-3000:]


def test_a_plan_without_waits_is_seen():
    done = on_cuda("lazy:1", "muon_ranks.py", "--seed", 5, "--cases", 4, "--without-waits")
    assert done.returncode == 1 and "seed 5, drawn" in done.stdout, done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize("mode", ["inline", "lazy:7"])
def test_exchanges_under_the_backward_wait_for_its_reductions(mode):
    done = on_cuda(mode, "muon_planned.py", "in_backward_of_two")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_dist_muon_takes_the_same_routes_to_the_same_numbers():
    pytest.importorskip("torchtitan.distributed.flex_shard", reason="DistMuon came with torchtitan 0.3.0")
    done = on_cuda("inline", "dist_muon.py")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    for mesh, ranks in json.loads(done.stdout.splitlines()[-1]).items():
        for rank, said in enumerate(ranks):
            assert said["routes"]["ours"] == said["routes"]["theirs"], (mesh, rank)
            assert len(said["routes"]["ours"]) == 18  # there and back, three exchanges, three steps
            assert set(said["differences"].values()) == {0.0}, (mesh, rank, said["differences"])
