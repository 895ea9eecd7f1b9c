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
    shardplan(*words, "--muon", "16,2x8", "-o", folder / "trace.json")
    return folder


@pytest.mark.parametrize(
    ("script", "plan"),
    [
        ([], []),
        (["--checkpoint"], ["--checkpoint", "model.layers.*"]),
        (["--hsdp"], ["--mesh", "replicate=2", "shard=8"]),
        (["--accumulate", "2"], ["--accumulate", "2", "--no-sync"]),
        (["--muon"], ["--optimizer", "muon-fused"]),
        (["--muon", "--hsdp"], ["--optimizer", "muon-fused", "--mesh", "replicate=2", "shard=8"]),
    ],
    ids=["plain", "recomputed", "hsdp", "accumulated", "muon", "muon_hsdp"],
)
def test_both_roads_say_one_step(folder, script, plan):
    shardplan(
        "plan", folder / "trace.json", "--cluster", CLUSTER, "--ranks", RANKS, "--unit", "model.layers.*",
        "--param-dtype", "bfloat16", "--reduce-dtype", "float32", "-q",
        *([] if "--optimizer" in plan else ["--optimizer", "adamw-fused"]), *plan, "-o", folder / "plan.json",
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


def test_stages_of_a_pipeline_are_joined(tmp_path):
    """Stages that are alike work on m micro-batches, and are idle for as long as p - 1 of them take."""
    stages, micro_batches = 2, 4
    report, trace, page = tmp_path / "report.json", tmp_path / "kineto.json", tmp_path / "page.html"
    words = ["--gpus", 2 * stages, "--no-history", "--cluster", CLUSTER, "--report", report, "--kineto", trace]
    words += ["--step-html", page]
    script = ["torchrun", "--nproc_per_node", 4, ROOT / "examples" / "rehearse" / "pipeline.py", stages, micro_batches]
    done = rehearse(*words, "--", *script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 2 is rehearsed, too: it is another stage of the pipeline" in done.stderr
    memory = r"^rank +max allocated +max reserved +fits\n0 .*\n2 .*yes$"
    assert re.search(memory, done.stdout, re.MULTILINE), done.stdout
    rows = [line.split() for line in done.stdout.split("done at\n")[1].split("\n\n")[0].splitlines()]
    assert [row[0] for row in rows] == ["0", "2"]
    rehearsed = json.loads(report.read_text())
    passes_ns = rehearsed["forward_ns"] + rehearsed["backward_ns"]
    expected_ns = passes_ns * (micro_batches + stages - 1) / micro_batches + rehearsed["optimizer_ns"]
    assert expected_ns < rehearsed["step_ns"] < 1.1 * expected_ns  # more: messages, gathers before the first layer
    assert "2 ranks wait for each other, the other ranks do the same as these" in str(rehearsed["notes"])
    kernels = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == "kernel"]
    assert {event["pid"] for event in kernels} == {0, 1}
    drawn = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text()).group(1))
    assert drawn["comparison"]["titles"] == ["rank 0", "rank 2"]
    rows, texts = drawn["plans"][0]["rows"], drawn["plans"][0]["texts"]
    assert {row.rpartition(" stream ")[0] for row in rows} == {"rank 0", "rank 2"}
    assert {"send mesh_pp to rank 2, 16.8 MB", "recv mesh_pp from rank 0, 16.8 MB", "aten::mm 0.linear1"} <= set(texts)
    received = {event["pid"]: event["ts"] for event in reversed(kernels) if event["name"] == "nccl:recv"}
    sent = {event["pid"]: event["ts"] for event in reversed(kernels) if event["name"] == "nccl:send"}
    assert received[1] == pytest.approx(sent[0], abs=0.001)  # the first message


def test_a_stage_that_fails_says_no_time(tmp_path):
    done = rehearse(
        "--gpus", 4, "--no-history", "--steps", 1, "--cluster", CLUSTER, "--", "torchrun", "--nproc_per_node", 4,
        SCRIPTS / "failing_stage.py",
    )  # fmt: skip
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}{done.stdout}"
    assert "no time: rank 2, another stage of the pipeline, ended early" in done.stderr
    assert "this stage has no data" in done.stderr
