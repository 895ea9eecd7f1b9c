# SPDX-License-Identifier: Apache-2.0
"""Files of others where a document is expected: what they are, and which command takes them. `explain` of a mesh that
shards nothing."""

import gzip
import io
import json
import pickle
import subprocess

import pytest
import torch
from conftest import ROOT, build_folder

COMMAND = build_folder() / "bin" / "shardplan"
TRACE = ROOT / "examples/three_layers/trace.json"


def shardplan(*arguments):
    return subprocess.run([COMMAND, *map(str, arguments)], capture_output=True, text=True)


def archive():
    file = io.BytesIO()
    torch.save({"a": torch.zeros(2)}, file)
    return file.getvalue()


FILES = {
    "snapshot": (pickle.dumps({"segments": [], "device_traces": [[]]}), ["memory snapshot", "import-profile"]),
    "old snapshot": (pickle.dumps({"segments": []}, protocol=2), ["memory snapshot", "import-profile"]),
    "toml": (b'# a job\n\n[model]\nname = "llama3"\n', ["TOML", "shardplan plan"]),
    "toml without a table": (b"steps = 10\n", ["TOML"]),
    "toml with a list of tables": (b"[[override]]\nx = 1\n", ["TOML"]),
    "yaml": (b"---\n# accelerate\nfsdp_config:\n  a: 1\n", ["YAML"]),
    "torch.save": (archive(), ["zip", "reshard-checkpoint"]),
    "gzip": (gzip.compress(json.dumps({"traceEvents": []}).encode()), ["torch.profiler", "import-profile"]),
    "damaged gzip": (gzip.compress(b"{}")[:-3], ["gzip"]),
    "profile": (json.dumps({"traceEvents": []}).encode(), ["torch.profiler", "import-profile"]),
    "config": (
        json.dumps({"model_type": "llama", "architectures": ["x"]}).encode(),
        ["Hugging Face", "shardplan trace"],
    ),
    "table": (b"device,collective,ranks_per_group\n", ["measurements", "shardplan cost"]),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("command", ["plan", "simulate", "validate", "explain", "memory"])
def test_a_foreign_file_is_called_by_its_name(kind, command, tmp_path):
    text, words = FILES[kind]
    (tmp_path / "file").write_bytes(text)
    done = shardplan(command, tmp_path / "file")
    assert done.returncode == 3, done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[1, 2]", b"\x00\x01\x02", b"hello world", b'{"schema": "shardplan.trace/1"}']
)
def test_what_is_nothing_known_has_the_readers_error(text, tmp_path):
    (tmp_path / "file").write_bytes(text)
    for command in ("plan", "simulate"):
        done = shardplan(command, tmp_path / "file")
        assert done.returncode == 3 and "no document of shardplan" not in done.stderr, done.stderr


@pytest.mark.parametrize(("mesh", "words", "absent"), [
    (("replicate=8", "shard=1"), ["all-reduced over replicas once a step", "whole on every rank"], ["reduced never"]),
    (("replicate=2", "shard=4"), ["; reduced once a step", "all-reduced over replicas once a step"], ["never"]),
    (("shard=8",), ["; reduced once a step"], ["replicas", "never"]),
])  # fmt: skip
def test_explain_says_how_gradients_are_reduced(mesh, words, absent, tmp_path):
    done = shardplan("plan", TRACE, "--cluster", "h100_sxm_8", "--mesh", *mesh, "-q", "-o", tmp_path / "p.json")
    assert done.returncode == 0, done.stderr
    text = shardplan("explain", tmp_path / "p.json").stdout
    for word in words:
        assert word in text, text
    for word in absent:
        assert word not in text, text


def test_cures_that_change_no_numbers_come_first(tmp_path):
    arguments = ("--cluster", "h100_sxm_8", "--param-dtype", "bfloat16", "--reduce-dtype", "float32")
    assert shardplan("plan", TRACE, *arguments, "-q", "-o", tmp_path / "p.json").returncode == 0
    text = shardplan("explain-memory", tmp_path / "p.json", "--trace", TRACE).stdout
    table = text[text.index("planned again with") :].splitlines()[1:]
    marked = [line.endswith("changes numbers") for line in table if line]
    assert True in marked and False in marked and marked == sorted(marked), text
