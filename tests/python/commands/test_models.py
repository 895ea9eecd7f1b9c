# SPDX-License-Identifier: Apache-2.0
"""Traces that are shipped: found by name, equal to what the tracer makes, read as any other; damaged ones are refused
in one line."""

import gzip
import json
import pathlib
import random
import subprocess
import sys

import pytest
from conftest import ROOT, build_folder

MODELS = ROOT / "tools" / "models"
SHIPPED = sorted(path.name.removesuffix(".trace.json.gz") for path in MODELS.glob("*.trace.json.gz"))
CLUSTER = ["--cluster", "h100", "--ranks", "8", "-q"]


def shardplan(*arguments: object, cwd: pathlib.Path | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [build_folder() / "bin" / "shardplan", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )


def by_name(shipped: str) -> list[str]:
    """A user's arguments."""
    model, _, seq = shipped.partition(".seq")
    return [model, *(["--seq", seq] if seq else [])]


def test_every_config_has_traces():
    assert {name.partition(".seq")[0] for name in SHIPPED} == {
        path.stem for path in (ROOT / "examples" / "models").glob("*.json")
    }


@pytest.mark.parametrize("shipped", SHIPPED)
def test_a_model_is_planned_by_name_as_its_trace_is(shipped, tmp_path):
    trace = tmp_path / "trace.json"
    trace.write_bytes(gzip.decompress((MODELS / f"{shipped}.trace.json.gz").read_bytes()))
    assert "/" not in json.loads(trace.read_text())["source"]
    plans = []
    for source in (by_name(shipped), [trace]):
        plans.append(tmp_path / f"{len(plans)}.json")
        done = shardplan("plan", *source, *CLUSTER, "-o", plans[-1])
        assert done.returncode == 0, done.stderr
    assert plans[0].read_bytes() == plans[1].read_bytes()


@pytest.mark.parametrize("model", ["vit-large"])  # the others: dev/update_models --check, nightly
def test_a_shipped_trace_is_what_the_tracer_makes(model):
    done = subprocess.run(
        [sys.executable, ROOT / "dev" / "update_models", model, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_commands_that_take_a_trace_take_a_name(tmp_path):
    plan, certificate = tmp_path / "plan.json", tmp_path / "certificate.json"
    name = by_name("gpt2-xl.seq1024")
    asked = ["--memory-budget", "70GiB", "--plan-limit", "5", "-o", plan, "--certificate", certificate]
    assert (done := shardplan("optimize", *name, *CLUSTER, *asked)).returncode == 0, done.stderr
    assert (done := shardplan("certify", plan, certificate, "--trace", *name)).returncode == 0, done.stderr
    assert shardplan("plan", *name, *CLUSTER, "--unit", "transformer.h.*", "-o", plan).returncode == 0
    assert (done := shardplan("explain-memory", plan, "--trace", *name)).returncode == 0, done.stderr
    assert (
        done := shardplan("export", plan, "--fsdp2", "--trace", *name, "-o", tmp_path / "apply.py")
    ).returncode == 0, done.stderr
    assert (
        done := shardplan(
            "sweep", "gpt2-xl", "--seq", "1024", "--ranks", "8", "--cluster", "h100", "-o", tmp_path / "sweep.csv"
        )
    ).returncode == 0, done.stderr
    assert ",yes," in (tmp_path / "sweep.csv").read_text()


def test_without_a_length_it_is_the_tracers_or_the_longest(tmp_path):
    for model, length in (("llama-3.1-8b", "2048"), ("gpt2-xl", "1024")):
        plans = [tmp_path / "a.json", tmp_path / "b.json"]
        for plan, more in zip(plans, ([], ["--seq", length])):
            assert shardplan("plan", model, *more, *CLUSTER, "-o", plan).returncode == 0
        assert plans[0].read_bytes() == plans[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (
            ["llama-3.1-9b"],
            3,
            "llama-3.1-9b: no such trace file, nor a model whose traces are shipped (expected a path, or one of: "
            "bert-large, ",
        ),
        (
            ["llama-3.1-8b", "--seq", "1000"],
            3,
            "llama-3.1-8b: the trace with this sequence length is not shipped; `shardplan trace` makes it (found "
            "--seq 1000, expected one of: 2048, 4096, 8192)",
        ),
        (["vit-large", "--seq", "16"], 3, "vit-large: the model has no sequence (found --seq 16, expected no --seq)"),
        (["llama-3.1-8b", "--seq", "0"], 2, "--seq"),
        (["there.json", "--seq", "16"], 2, "--seq is of shipped models, and the trace is a file (found there.json)"),
    ],
)
def test_what_is_not_shipped_is_said(arguments, code, says, tmp_path):
    (tmp_path / "there.json").write_text("{}")
    done = shardplan("plan", *arguments, *CLUSTER, cwd=tmp_path)
    assert done.returncode == code and says in done.stderr, done.stderr


def test_a_file_goes_before_a_model(tmp_path):
    (tmp_path / "llama-3.1-8b").write_text("no trace")
    done = shardplan("plan", "llama-3.1-8b", *CLUSTER, cwd=tmp_path)
    assert done.returncode == 3 and "llama-3.1-8b: " in done.stderr


@pytest.mark.parametrize("seed", range(40))
def test_damaged_traces_are_refused_in_one_line(seed, tmp_path):
    draw = random.Random(seed)
    whole = (MODELS / "vit-large.trace.json.gz").read_bytes()
    damaged = bytearray(whole)
    kind = draw.choice(["cut", "byte", "more", "footer"])
    if kind == "cut":
        damaged = damaged[: draw.randrange(2, len(whole))]
    elif kind == "byte":
        damaged[draw.randrange(10, len(whole) - 8)] ^= 1 << draw.randrange(8)
    elif kind == "more":
        damaged += draw.randbytes(draw.randint(1, 100))
    else:
        damaged[-draw.randint(1, 8)] ^= 0xFF
    (tmp_path / "t.json.gz").write_bytes(damaged)
    done = shardplan("validate", "t.json.gz", cwd=tmp_path)
    assert done.returncode in (3, 4) and len(done.stderr.splitlines()) == 1 and "t.json.gz: " in done.stderr, (
        f"seed {seed}: {done.stderr}"
    )
