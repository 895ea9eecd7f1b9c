# SPDX-License-Identifier: Apache-2.0
"""`shardplan cost RUNS.csv` of runs on meshes: the shipped builder of Llama-like models, beside published rows."""

import csv
import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT, build_folder

COMMAND = build_folder() / "bin" / "shardplan"
TABLE = ROOT / "tools" / "clusters" / "tables" / "training_runs_meshes_2026.csv"
ROW = {
    "gpus": 32, "dim": 256, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "ffn_hidden": 512, "vocabulary": 1024,
    "sequence": 128, "micro_batch": 2,
}
TRACED = """
import json, sys
sys.path.insert(0, sys.argv[1])
from shardplan.runs import llama
from shardplan.tracer import session
row = json.loads(sys.argv[2])
options = session.Options(batch=2, seq=128, dtype="bfloat16", param_dtype="float32")
trace = session.trace_callable(lambda: llama.build(row), "row", options)
json.dump(trace, sys.stdout)
"""


def traced(**changes):
    done = subprocess.run(
        [sys.executable, "-c", TRACED, ROOT / "tools" / "python", json.dumps(ROW | changes)], capture_output=True,
        text=True, check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def operators(trace):
    return [e for kind in ("forwards", "backwards") for p in trace[kind] for e in p["events"] if e[0] == "op"]


def flops(trace):
    return sum(event[4] for event in operators(trace))


def collectives(trace):
    """How many of each kind on each communicator."""
    counts = {}
    for event in operators(trace):
        if len(event) > 11:
            key = event[11]["kind"], trace["communicators"][event[11]["communicator"]]["name"]
            counts[key] = counts.get(key, 0) + 1
    return counts


@pytest.fixture(scope="module")
def whole():
    return traced()


@pytest.mark.parametrize("changes", [{"tp": 4}, {"tp": 2, "cp": 2}, {"tp": 4, "loss_parallel": True}])
def test_a_rank_has_its_part_of_the_work(whole, changes):
    cut = traced(**changes)
    assert flops(cut) * changes["tp"] * changes.get("cp", 1) == flops(whole)
    assert cut["same_batch"] == ["tp"] and cut["world_size"] == 32
    assert cut["tokens_per_batch"] * changes.get("cp", 1) == whole["tokens_per_batch"]


def test_experts_are_exchanged_twice_each_way():
    trace = traced(ep=8, experts=16, top_k=2)
    assert collectives(trace) == {("all_to_all", "ep"): 2 * 2 * ROW["n_layers"]}
    sizes = {event[11]["size_bytes"] for event in operators(trace) if len(event) > 11}
    assert sizes == {2 * 128 * 2 * 256 * 2}, "tokens x experts of each x width x 2 bytes"
    cut = {entry["fqn"]: entry["shape"] for entry in trace["parameters"] if entry.get("placements")}
    assert cut["layers.0.mlp.gate"] == [16 // 8, 256, 512]


def test_degrees_that_do_not_divide_the_ranks_are_said(tmp_path):
    with open(TABLE, newline="") as file:
        rows = list(csv.DictReader(file))
    (tmp_path / "runs.csv").write_text(f"{','.join(rows[0])}\n{','.join((rows[0] | {'tp': '3'}).values())}\n")
    done = subprocess.run(
        [COMMAND, "cost", tmp_path / "runs.csv", "--builder", "shardplan.runs.llama:build"], capture_output=True,
        text=True, check=False,
    )
    assert done.returncode == 3
    assert "/line/2: the builder's model cannot be traced" in done.stderr
    assert "32 GPUs are no multiple of" in done.stderr


def test_published_rows_are_predicted_unfitted(tmp_path):
    """Two of the twelve: one in a node, one over eight nodes."""
    with open(TABLE, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] in ("7b tp2 fsdp2", "7b tp4 fsdp8")]
    with open(tmp_path / "runs.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    done = subprocess.run(
        [COMMAND, "cost", tmp_path / "runs.csv", "--builder", "shardplan.runs.llama:build"], capture_output=True,
        text=True, check=False,
    )
    assert done.returncode == 0, done.stderr
    errors = [float(error) for error in re.findall(r"true +\d+ +\d+ +([+-][\d.]+)%", done.stdout)]
    assert len(errors) == 2 and all(abs(error) < 15 for error in errors), done.stdout
