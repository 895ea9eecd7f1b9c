# SPDX-License-Identifier: Apache-2.0
"""`plan --units-of`: the units of the plan against those that the installed frameworks make of the same model
(framework_units.py)."""

import collections
import importlib.util
import json
import os
import pathlib
import re
import subprocess

import pytest
import warm
from conftest import ROOT, build_folder

COMMAND = build_folder() / "bin" / "shardplan"
HERE = pathlib.Path(__file__).parent
PACKAGES = {
    "by_hand": [], "accelerate": ["accelerate"], "accelerate_checkpoints": ["accelerate"],
    "peft": ["accelerate", "peft"],
    "torchtitan": ["torchtitan", "spmd_types"],
}
CASES = [
    *(("accelerate", "fsdp2", name) for name in ("llama", "llama_tied", "gpt2", "phi", "mixtral")),
    *(("accelerate", "fsdp1", name) for name in ("llama", "gpt2", "t5", "bert")),
    *(("peft", policy, name) for policy in ("fsdp1", "fsdp2") for name in ("lora", "lora_saved", "prompts")),
    ("peft", "fsdp1", "llama"),
    *(("torchtitan", "fsdp2", name) for name in ("titan", "titan_tied", "llama", "llama_tied", "phi", "mixtral")),
]
# Builders of framework_builders.py, and whose units theirs are. A Trainer prepares its model by accelerate.
BUILDERS = [
    *((f"accelerate__{model}__plain", ("accelerate", "fsdp2", model)) for model in ("llama", "llama_tied", "gpt2")),
    ("accelerate__llama__broadcast", ("accelerate", "fsdp2", "llama")),
    ("accelerate__llama_tied__broadcast", ("accelerate", "fsdp2", "llama_tied")),
    ("accelerate__llama__checkpoints", ("accelerate_checkpoints", "fsdp2", "llama")),
    ("accelerate__llama__offload", ("accelerate", "fsdp2", "llama")),
    ("trainer__llama__plain", ("accelerate", "fsdp2", "llama")),
    ("trainer__llama__checkpoints", ("accelerate_checkpoints", "fsdp2", "llama")),
]
BY_HAND = [("by_hand", policy, "llama") for policy in ("fsdp2", "fsdp1")]
FAIL = [("accelerate", "fsdp2", "t5", "first_step"), ("accelerate", "fsdp2", "bert", "first_step")]


def is_installed(framework):
    return all(importlib.util.find_spec(package) for package in PACKAGES[framework])


def environment():
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'tools/python'}:{HERE}", "OMP_NUM_THREADS": "1"}


def program(*arguments):
    return warm.Program([HERE / "framework_units.py", *arguments], env=environment(), cwd=HERE)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(the frameworks' units by case, the folder of the traces): each from one process, which imports torch and
    transformers once."""
    folder = tmp_path_factory.mktemp("traces")
    built = dict.fromkeys(case for _, case in BUILDERS if case not in CASES)
    cases = [case for case in (*CASES, *built, *BY_HAND, *FAIL) if is_installed(case[0])]
    names = {case[2] for case in cases} | {"titan", "t5"}
    frameworks, traces = program(*(":".join(case) for case in cases)), program("--traces", folder, *sorted(names))
    (printed, said), (_, refused) = frameworks.communicate(), traces.communicate()
    assert frameworks.returncode == 0, said[-3000:]
    assert traces.returncode == 0, refused[-3000:]
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{"case"')]
    return {tuple(line["case"].split(":")): line for line in lines}, folder


@pytest.fixture
def theirs(made):
    def units(*case):
        if not is_installed(case[0]):
            pytest.skip(f"{' and '.join(PACKAGES[case[0]])} are not installed")
        return made[0][case]

    return units


@pytest.fixture
def traces(made):
    return lambda model: made[1] / f"{model}.json"


def plan(path, *arguments, out):
    return subprocess.run(
        [COMMAND, "plan", path, "--ranks", "2", "-q", "-o", out, *arguments], capture_output=True, text=True
    )


def ours(path, tmp_path, policy, *rule):
    done = plan(path, "--policy", policy, *rule, out=tmp_path / "plan.json")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "plan.json").read_text())
    instructions = [
        i for trigger in document["steps"][document["steady_step"]]["triggers"] for i in trigger["instructions"]
    ]
    gathers = collections.Counter(i["unit"] for i in instructions if i["kind"] == "all_gather")
    units = []
    for unit in document["units"]:
        if parameters := sorted(p["fqn"] for p in unit["parameters"]):
            units.append((parameters, gathers[unit["fqn"]] == 2 if policy == "fsdp2" else None))
    return sorted(units)


@pytest.mark.parametrize(("framework", "policy", "model"), CASES)
def test_the_units_are_those_of_the_installed_framework(framework, policy, model, theirs, traces, tmp_path):
    wanted = theirs(framework, policy, model)
    assert "error" not in wanted, wanted
    found = ours(traces(model), tmp_path, policy, "--units-of", framework)
    assert [unit[0] for unit in found] == [unit[0] for unit in wanted["units"]]
    assert found == [tuple(unit) for unit in wanted["units"]]


@pytest.mark.parametrize(("builder", "case"), BUILDERS)
def test_a_builder_may_have_the_framework_shard_the_model(builder, case, theirs, tmp_path):
    wanted = theirs(*case)
    trace, strategy = tmp_path / "trace.json", tmp_path / "strategy.json"
    command = "import sys\nfrom shardplan.tracer import cli\nsys.exit(cli.main(sys.argv[1:]))"
    words = [f"framework_builders:{builder}", "-q", "-o", trace, "--strategy", strategy, "--batch", "2", "--seq", "8"]
    done = warm.run(["-c", command, *words], env=environment(), cwd=HERE, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = ours(trace, tmp_path, "fsdp2", "--strategy", strategy)
    assert found == [tuple(unit) for unit in wanted["units"]]
    document = json.loads(strategy.read_text())
    assert document["mixed_precision"]["param_dtype"] == "bfloat16"
    assert ("checkpoint" in document) == builder.endswith("checkpoints")
    assert document.get("cpu_offload", False) == builder.endswith("offload")


@pytest.mark.parametrize("page", ["README.md", "docs/guide/by-example.md", "docs/guide/size-a-job.md"])
@pytest.mark.parametrize("case", BY_HAND, ids=lambda case: case[1])
def test_a_rule_of_the_pages_makes_the_units_of_the_loop_over_layers(page, case, theirs, traces, tmp_path):
    """`--unit 'model.layers.*'` is `for layer in model.model.layers: fully_shard(layer)` and `fully_shard(model)`, and
    not accelerate's units."""
    rules = set(re.findall(r"--unit '([^']+)'", (ROOT / page).read_text(encoding="utf-8")))
    assert rules == {"model.layers.*"}, rules
    found = ours(traces("llama"), tmp_path, case[1], "--unit", *rules)
    assert found == [tuple(unit) for unit in theirs(*case)["units"]]
    if case[1] == "fsdp2" and is_installed("accelerate"):
        assert found != [tuple(unit) for unit in theirs("accelerate", "fsdp2", "llama")["units"]]


@pytest.mark.parametrize(
    ("model", "ours"), [("t5", "PyTorch fails here"), ("bert", "PyTorch fails with the units that accelerate makes")]
)
def test_what_accelerate_makes_and_pytorch_refuses_is_refused(model, ours, theirs, traces, tmp_path):
    """T5's encoder keeps its own module of the shared weight, outside of the group; BERT's embeddings are a layer
    around the input embeddings."""
    done = plan(traces(model), "--units-of", "accelerate", out=tmp_path / "p.json")
    assert done.returncode == 3 and ours in done.stderr, done.stderr
    assert "error" in theirs("accelerate", "fsdp2", model, "first_step")


@pytest.mark.skipif(not is_installed("peft"), reason="peft is not installed")
def test_pefts_policy_wraps_no_layer_under_fsdp2(traces, tmp_path):
    units = ours(traces("lora"), tmp_path, "fsdp2", "--units-of", "peft")
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
