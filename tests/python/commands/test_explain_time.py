# SPDX-License-Identifier: Apache-2.0
"""`shardplan explain`, `compare` and `simulate --ranks-apart` as a user meets them."""

import json
import re

import pytest
from conftest import ROOT

TRACE = ROOT / "examples" / "three_layers" / "trace.json"
CLUSTER = ROOT / "examples" / "three_layers" / "cluster.json"


@pytest.fixture(scope="module")
def plans(shardplan, tmp_path_factory):
    """Three equal layers of 25 and 50 ms under collectives of 10 ms; fsdp2 as it is, kept gathered, and on a shipped
    cluster."""
    folder = tmp_path_factory.mktemp("plans")
    made = {}
    for name, more in {
        "default": ["--cluster", CLUSTER], "kept": ["--cluster", CLUSTER, "--reshard-after-forward", "false"],
        "h100": ["--ranks", "8"],
    }.items():
        made[name] = folder / f"{name}.json"
        result = shardplan("plan", TRACE, "--unit", "layers.*", *more, "-q", "-o", made[name])
        assert result.returncode == 0, result.stderr
    return made


def test_explain_says_where_the_time_goes(shardplan, plans):
    result = shardplan("explain", plans["default"])
    assert result.returncode == 0, result.stderr
    text = result.stdout.split("critical path")[1]
    causes = {
        match[1]: float(match[2])
        for match in re.finditer(r"^  (\S[\w ]*?) +([\d.]+) ms +[\d.]+ %$", text, re.MULTILINE)
    }
    step = causes.pop("step")
    assert step == 245.0 and sum(causes.values()) == pytest.approx(step, abs=0.01)
    assert "without the wait for all_gather layers.0 in the forward: -10.000 ms (forward_prefetch)" in result.stdout


def test_explain_says_how_even_owners_are(shardplan, tmp_path):
    """Three matrices of 64 x 64 on two ranks: one has two of them."""
    (tmp_path / "model.py").write_text(
        "import torch.nn as nn\n"
        "def build():\n"
        "    layers = (nn.Linear(64, 64, bias=False) for _ in range(3))\n"
        "    return nn.Sequential(nn.Embedding(10, 64), nn.Sequential(*layers), nn.Linear(64, 10, bias=False))\n"
    )
    trace, plan = tmp_path / "trace.json", tmp_path / "plan.json"
    for words in (
        ("trace", "model:build", "--batch", 1, "--seq", 8, "--muon", 1, "-q", "-o", trace),
        ("plan", trace, "--ranks", 2, "--unit", "1.*", "--optimizer", "muon", "--muon-matrices", "1.*.*",
         "--muon-owners", "shards", "-q", "-o", plan),
    ):  # fmt: skip
        done = shardplan(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    said = shardplan("explain", plan).stdout
    text = said.split("owners of matrices: ")[1]
    assert text.startswith("3 orthogonalised on 2 of 2 ranks\n")
    busiest, mean = map(float, re.search(r"Newton-Schulz  ([\d.]+) ms on the busiest, ([\d.]+) ms", text).groups())
    assert busiest == pytest.approx(mean * 4 / 3, rel=0.01)
    # In bfloat16 a matrix is a 128th of a mebibyte.
    assert "whole matrices of an exchange  0.0156 MiB on the rank with the most, 0.0117 MiB on a mean one" in text


def test_compare_adds_up(shardplan, plans, tmp_path):
    causes = tmp_path / "causes.json"
    result = shardplan("compare", plans["default"], plans["h100"], "--json", causes)
    assert result.returncode == 0, result.stderr
    made = json.loads(causes.read_text())
    for side in "ab":
        assert sum(cause[side] for cause in made["time_ns"]) == made[f"step_{side}_ns"]
        assert sum(cause[side] for cause in made["memory_bytes"]) == made[f"memory_{side}_bytes"]
    assert "cluster: constant_10_ms ->" in result.stdout
    answer, tables = result.stdout.split("\n\n")[1], result.stdout.split("\n\n")[2:]
    faster = "A" if made["step_a_ns"] < made["step_b_ns"] else "B"
    assert answer.startswith(f"{faster} is ") and "the other one's 245.000 ms; most of it: " in answer, answer
    assert answer.splitlines()[1].startswith(("A needs ", "B needs ")) and "time, on the critical path" in "".join(
        tables
    )
    same = shardplan("compare", plans["default"], plans["default"])
    assert same.stdout.split("\n\n")[1].startswith("Both steps take 245.000 ms.\nBoth need ")
    assert "made from the same" in same.stdout and "+0.000 ms" in same.stdout
    kept = shardplan("compare", plans["default"], plans["kept"])
    assert "reshard_after_forward" in kept.stdout
    assert shardplan("compare", plans["default"]).returncode == 2
    assert shardplan("compare", plans["default"], TRACE).returncode == 3


def test_a_slow_rank_is_simulated_apart(shardplan, plans):
    """The slow rank's kernels take twice as long and it never waits: 10 + 2 x 225 + 10 ms."""
    result = shardplan("simulate", plans["default"], "--ranks-apart", "--straggler", "5=2", "-q")
    assert result.returncode == 0, result.stderr
    assert (
        "8 ranks apart: step 470.00 ms, 245.00 ms when all are alike" in result.stdout
        and "rank 5 the least (0.00 ms)" in result.stdout
    )
    alike = shardplan("simulate", plans["default"], "--ranks-apart", "-q")
    assert "8 ranks apart: step 245.00 ms" in alike.stdout
    chance = [
        shardplan("simulate", plans["default"], "--ranks-apart", "--jitter", "10", "--seed", seed, "-q").stdout
        for seed in (1, 1, 2)
    ]
    assert chance[0] == chance[1] != chance[2]


@pytest.mark.parametrize(
    ("more", "code", "word"),
    [
        (["--straggler", "1=2"], 2, "--ranks-apart"),
        (["--ranks-apart", "--straggler", "1"], 2, "RANK=FACTOR"),
        (["--ranks-apart", "--straggler", "1=0.5"], 2, "RANK=FACTOR"),
        (["--ranks-apart", "--straggler", "8=2"], 2, "0 to 7"),
    ],
)
def test_wrong_ranks(shardplan, plans, more, code, word):
    result = shardplan("simulate", plans["default"], *more)
    assert result.returncode == code and word in result.stderr


def test_a_report_has_the_interval_and_what_it_is_from(shardplan, plans, tmp_path):
    report, page = tmp_path / "r.json", tmp_path / "r.html"
    assert shardplan("simulate", plans["h100"], "--report", report, "--html", page, "-q").returncode == 0
    made = json.loads(report.read_text())
    assert made["step_low_ns"] <= made["step_ns"] <= made["step_high_ns"]
    widths = [abs(figure["worse_ns"] - figure["better_ns"]) for figure in made["figures"]]
    assert widths == sorted(widths, reverse=True) and widths[0] > 0
    assert '"figures":[["' in page.read_text() and 'id="tornado"' in page.read_text()
    assert shardplan("simulate", plans["default"], "--report", report, "-q").returncode == 0
    assert "step_low_ns" not in json.loads(report.read_text())
