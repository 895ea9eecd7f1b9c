# SPDX-License-Identifier: Apache-2.0
"""The peak that `shardplan run` measures is the simulated one where Muon's exchanges are the peak of the step."""

import json
import pathlib
import re
import sys

import muon_planned
import pytest
import torch
import torch.nn as nn
from conftest import ROOT, build_folder, on_device

RANKS, LAYERS = 2, 6
BY_LAYER = tuple(word for number in range(LAYERS) for word in ("--muon-bucket", f"0.{number}.weight"))
WAYS = {
    "shards": ("--muon-owners", "shards"),
    "all": ("--muon-owners", "all"),
    "all_by_layer": ("--muon-owners", "all", *BY_LAYER),
}


def layers():
    """For `shardplan trace test_muon_memory:layers`: parameters, and next to no activations."""
    chain = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(LAYERS)))
    return nn.Sequential(chain), torch.zeros(1, 256), lambda output: output.sum()


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Way -> plan, report."""
    folder, program = tmp_path_factory.mktemp("memory"), build_folder() / "bin" / "shardplan"
    here, trace = pathlib.Path(__file__).resolve().parent, folder / "trace.json"
    cluster = json.loads((ROOT / "examples" / "train_gpt" / "cluster.json").read_text())
    cluster["ranks"] = cluster["ranks_per_node"] = RANKS
    (folder / "cluster.json").write_text(json.dumps(cluster))
    words = ["--muon", RANKS, "--muon-matrices", "0.*.weight", "-o", trace]
    muon_planned.run([sys.executable, "-m", "shardplan.tracer", "test_muon_memory:layers", *words], here)
    made = {}
    for way, owners in WAYS.items():
        plan, report = folder / f"{way}.json", folder / f"{way}.report.json"
        words = ["--cluster", folder / "cluster.json", "--unit", "0.*", "--optimizer", "muon", *owners]
        words += ["--muon-matrices", "0.*.weight", "-q", "-o", plan]
        muon_planned.run([program, "plan", trace, *words], here)
        muon_planned.run([program, "simulate", plan, "--report", report], here)
        made[way] = plan, report
    return made


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("way", WAYS)
def test_the_measured_peak_is_the_simulated_one(plans, shardplan, way, device):
    plan, report = plans[way]
    assert json.loads(report.read_text())["memory"]["peak_at"] == "steady optimizer_step: orthogonalize"
    words = ["--ranks", RANKS, "--device", device, "--compute-scale", 0, "--steps", 3, "--report", report]
    if device == "cpu":
        run = shardplan("run", plan, *words)
    else:  # by PyTorch's caching allocator
        run = on_device([str(word) for word in (build_folder() / "bin" / "shardplan-run", plan, *words)], "null")
    assert run.returncode == 0, run.stderr
    ((measured, simulated),) = re.findall(r"^peak memory in bytes +(\d+) +(\d+)$", run.stdout, re.MULTILINE)
    assert measured == simulated
