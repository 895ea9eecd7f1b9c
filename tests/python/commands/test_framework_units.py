# SPDX-License-Identifier: Apache-2.0
"""`plan --units-of`: the units of the plan against those that the installed frameworks make of the same model (framework_units.py)."""

import collections
import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest
from conftest import ROOT, build_folder, free_port

COMMAND = build_folder() / "bin" / "shardplan"
HERE = pathlib.Path(__file__).parent
CASES = [
    *(("accelerate", "fsdp2", name) for name in ("llama", "llama_tied", "gpt2", "phi", "mixtral")),
    *(("accelerate", "fsdp1", name) for name in ("llama", "gpt2", "t5", "bert")),
    *(("peft", policy, name) for policy in ("fsdp1", "fsdp2") for name in ("lora", "prompts")),
    ("peft", "fsdp1", "llama"),
    *(("torchtitan", "fsdp2", name) for name in ("titan", "titan_tied", "llama", "llama_tied", "phi", "mixtral")),
]


def environment(**more):
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'tools/python'}:{HERE}", "OMP_NUM_THREADS": "1", **more}


@functools.cache
def theirs(framework, policy, model):
    command = [sys.executable, HERE / "framework_units.py", framework, policy, model]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(MASTER_PORT=str(free_port())))
    assert done.returncode == 0, done.stderr[-3000:]
    return [(parameters, reshard) for parameters, reshard in json.loads(done.stdout.splitlines()[-1])]


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")

    def trace(model):
        path = folder / f"{model}.json"
        if not path.exists():
            command = [COMMAND, "trace", f"framework_units:trace_{model}", "-o", path, "-q", "--loss", "sum", "--seq", "8"]
            done = subprocess.run(command, capture_output=True, text=True, env=environment())
            assert done.returncode == 0, done.stderr
        return path

    return trace


def plan(path, *arguments, out):
    return subprocess.run([COMMAND, "plan", path, "--ranks", "2", "-q", "-o", out, *arguments], capture_output=True, text=True)


def ours(path, tmp_path, framework, policy, *more):
    done = plan(path, "--policy", policy, "--units-of", framework, *more, out=tmp_path / "plan.json")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "plan.json").read_text())
    instructions = [i for trigger in document["steps"][document["steady_step"]]["triggers"] for i in trigger["instructions"]]
    gathers = collections.Counter(i["unit"] for i in instructions if i["kind"] == "all_gather")
    units = []
    for unit in document["units"]:
        if parameters := sorted(p["fqn"] for p in unit["parameters"]):
            units.append((parameters, gathers[unit["fqn"]] == 2 if policy == "fsdp2" else None))
    return sorted(units)


@pytest.mark.parametrize(("framework", "policy", "model"), CASES)
def test_the_units_are_those_of_the_installed_framework(framework, policy, model, traces, tmp_path):
    for package in {"accelerate": ["accelerate"], "peft": ["peft"], "torchtitan": ["torchtitan", "spmd_types"]}[framework]:
        pytest.importorskip(package)
    found = ours(traces(model), tmp_path, framework, policy)
    wanted = theirs(framework, policy, model)
    assert [u[0] for u in found] == [u[0] for u in wanted]
    assert found == wanted


@pytest.mark.parametrize(("model", "ours"), [("t5", "PyTorch fails here"), ("bert", "a unit inside another")])
def test_what_accelerate_makes_and_pytorch_refuses_is_refused(model, ours, traces, tmp_path):
    """T5's encoder keeps its own module of the shared weight, outside of the group; BERT's embeddings are a layer around the input embeddings."""
    done = plan(traces(model), "--units-of", "accelerate", out=tmp_path / "p.json")
    assert done.returncode == 3 and ours in done.stderr, done.stderr
    command = [sys.executable, HERE / "framework_units.py", "accelerate", "fsdp2", model, "first_step"]
    real = subprocess.run(command, capture_output=True, text=True, env=environment(MASTER_PORT=str(free_port())))
    assert real.returncode != 0, real.stdout


def test_pefts_policy_wraps_no_layer_under_fsdp2(traces, tmp_path):
    units = ours(traces("lora"), tmp_path, "peft", "fsdp2")
    assert len([u for u in units if any(".layers." in name for name in u[0])]) == 1


def test_what_cannot_be_said_is_an_error(traces, tmp_path):
    done = plan(traces("titan"), "--units-of", "accelerate", out=tmp_path / "p.json")
    assert done.returncode == 3 and "--unit class:NAME" in done.stderr
    done = plan(traces("t5"), "--units-of", "torchtitan", out=tmp_path / "p.json")
    assert done.returncode == 3 and "tok_embeddings" in done.stderr
    done = plan(traces("llama"), "--units-of", "torchtitan", "--policy", "fsdp1", out=tmp_path / "p.json")
    assert done.returncode == 2
    done = plan(traces("llama"), "--units-of", "accelerate", "--unit", "model.layers.*", out=tmp_path / "p.json")
    assert done.returncode == 2
