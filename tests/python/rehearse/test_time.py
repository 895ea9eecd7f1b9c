# SPDX-License-Identifier: Apache-2.0
"""The time of a rehearsed step: the same job by trace, plan and simulation, and by rehearsal."""

import gzip
import json
import re
import subprocess

import pytest
import torch
from conftest import ROOT, build_folder
from test_rehearse import SCRIPTS, rehearse

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
RANKS = 16
CLUSTER = "h100_sxm_64"  # as many of its devices as the job has
OTHER_RELEASE = "measured with other releases: attention, memory of the cluster with torch 2.11; the job ran with torch"


def shardplan(*words):
    return subprocess.run(
        [build_folder() / "bin" / "shardplan", *map(str, words)],
        capture_output=True, text=True, timeout=300, check=True,
    ).stdout  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("time")
    (folder / "llama.json").write_text(json.dumps(LLAMA))
    words = ["trace", folder / "llama.json", "--batch", 1, "--seq", 4096, "--dtype", "bfloat16", "-q"]
    shardplan(*words, "-o", folder / "trace.json")
    return folder


@pytest.mark.parametrize(
    ("script", "plan"),
    [
        ([], []),
        (["--checkpoint"], ["--checkpoint", "model.layers.*"]),
        (["--hsdp"], ["--mesh", "replicate=2", "shard=8"]),
        (["--accumulate", "2"], ["--accumulate", "2", "--no-sync"]),
    ],
    ids=["plain", "recomputed", "hsdp", "accumulated"],
)
def test_both_roads_say_one_step(folder, script, plan):
    shardplan(
        "plan", folder / "trace.json", "--cluster", CLUSTER, "--ranks", RANKS, "--unit", "model.layers.*",
        "--param-dtype", "bfloat16", "--reduce-dtype", "float32", "--optimizer", "adamw-fused", "-q", *plan,
        "-o", folder / "plan.json",
    )  # fmt: skip
    planned = json.loads(shardplan("simulate", folder / "plan.json", "--report", "-"))
    report, trace = folder / "report.json", folder / "kineto.json.gz"
    done = rehearse(
        "-q", "--gpus", RANKS, "--cluster", CLUSTER, "--report", report, "--kineto", trace, "--races", "--",
        "torchrun", "--nproc_per_node", "8", SCRIPTS / "llama_fsdp2.py", folder / "llama.json", *script,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^no races \(", done.stdout, re.MULTILINE), done.stdout
    assert (OTHER_RELEASE in done.stdout) == (not torch.__version__.startswith("2.11.")), done.stdout
    rehearsed = json.loads(report.read_text())
    for name, within in (
        ("step_ns", 0.02), ("backward_ns", 0.02), ("communication_ns", 0.02), ("tokens_per_second_per_rank", 0.02),
        ("model_flops_utilization_ppm", 0.02),
    ):  # fmt: skip
        assert rehearsed[name] == pytest.approx(planned[name], rel=within), (name, rehearsed[name], planned[name])
    kinds = {(c["kind"], c["count"], c["full_tensor_bytes"]) for c in planned["collectives"]}
    own = {(c["kind"], c["count"], c["full_tensor_bytes"]) for c in rehearsed["collectives"]}
    # transformers counts the labels' tokens over all ranks, which is not the model's.
    assert kinds <= own, (kinds, own)
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert max(e["ts"] + e["dur"] for e in kernels) == pytest.approx(rehearsed["step_ns"] / 1e3, rel=0.01)
    assert {"nccl:all_gather", "nccl:reduce_scatter", "aten::mm"} <= {event["name"] for event in kernels}


def test_a_cluster_without_room_for_the_job_says_no_time(folder):
    done = rehearse(
        "-q", "--gpus", RANKS, "--steps", 1, "--cluster", ROOT / "tools" / "clusters" / "h100_sxm_8.json", "--",
        "torchrun", "--nproc_per_node", "8", SCRIPTS / "llama_fsdp2.py", folder / "llama.json",
    )  # fmt: skip
    assert done.returncode == 0 and "no time: " in done.stderr, done.stderr
    assert "time of step" not in done.stdout
