# SPDX-License-Identifier: Apache-2.0
"""Memory of a training step on CPU ranks is the plan's, to the byte: the model's own included, as torch allocates
it."""

import subprocess
import sys

import pytest
from conftest import ROOT, build_folder

EXAMPLE = ROOT / "examples" / "predict_and_measure" / "predict_and_measure.py"

if not (build_folder() / "bin" / "shardplan-run").exists():
    pytest.skip("no executor in this build", allow_module_level=True)


def test_memory_of_a_step_is_the_plans(tmp_path, monkeypatch):
    """Times are nothing for a test: any cluster will do."""
    monkeypatch.setenv("SHARDPLAN_BUILD", str(build_folder()))
    monkeypatch.setenv("PATH", str(build_folder() / "bin"), prepend=":")
    cluster = ROOT / "examples" / "train_gpt" / "cluster.json"
    done = subprocess.run(
        [sys.executable, EXAMPLE, tmp_path, "--runs", "1", "--only", "demo", "--cluster", cluster],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("bytes, by the plan and measured\n")
    table = (tmp_path / "table.md").read_text().splitlines()
    assert len(table) == 3 and table[2].startswith("| demo, 0.1 million parameters |")
