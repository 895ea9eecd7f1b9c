# SPDX-License-Identifier: Apache-2.0
"""Every examples/*/ that has expected.txt: its `run` prints exactly that. Examples that take minutes run in the nightly
series (SHARDPLAN_LONG_EXAMPLES)."""

import os
import pathlib
import subprocess

import pytest
from conftest import ROOT, build_folder

# Start launchers, a cluster, and six to eight workers that import PyTorch; measure the machine; compile a training in
# C++, of which tests/python/cpp and the page on C++ have another build.
LONG = {"elastic", "gpt_cpp", "predict_and_measure", "ray_train", "restart"}
UPDATE = bool(os.environ.get("SHARDPLAN_UPDATE_EXAMPLES"))
ALL = sorted(path.parent for path in (ROOT / "examples").glob("*/run"))
EXAMPLES = [
    folder for folder in ALL if UPDATE or (folder.name in LONG) == bool(os.environ.get("SHARDPLAN_LONG_EXAMPLES"))
]


def test_every_example_says_what_it_prints():
    assert len(ALL) >= 3 and {folder.name for folder in ALL} > LONG
    assert UPDATE or all((folder / "expected.txt").exists() for folder in ALL)


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda p: p.name)
def test_example_prints_what_is_expected(folder: pathlib.Path, tmp_path: pathlib.Path):
    # Examples in C++: the compiler's optimisations take longer than what they run.
    env = {
        **os.environ, "CMAKE_BUILD_TYPE": "Debug", "RUNS": "1", "SHARDPLAN_BUILD": str(build_folder()),
        "PATH": f"{build_folder() / 'bin'}:{os.environ['PATH']}",
    }
    result = subprocess.run([str(folder / "run"), str(tmp_path)], cwd=folder, env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=580 if folder.name in LONG else 300)
    assert result.returncode == 0, result.stderr
    expected = folder / "expected.txt"
    if UPDATE:
        from shardplan.files import write_text

        write_text(expected, result.stdout)
    assert result.stdout == expected.read_text(), f"stderr was:\n{result.stderr}"
