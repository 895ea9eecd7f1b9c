"""Every examples/*/ that has expected.txt: its `run` prints exactly that."""

import os
import pathlib
import subprocess

import pytest
from conftest import ROOT, build_folder

EXAMPLES = sorted(p.parent for p in (ROOT / "examples").glob("*/run") if (p.parent / "expected.txt").exists()
                  or os.environ.get("SHARDPLAN_UPDATE_EXAMPLES"))


def test_there_are_examples():
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda p: p.name)
def test_example_prints_what_is_expected(folder: pathlib.Path, tmp_path: pathlib.Path):
    env = {**os.environ, "SHARDPLAN_BUILD": str(build_folder()), "PATH": f"{build_folder() / 'bin'}:{os.environ['PATH']}"}
    result = subprocess.run([str(folder / "run"), str(tmp_path)], cwd=folder, env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=300)
    assert result.returncode == 0, result.stderr
    expected = folder / "expected.txt"
    if os.environ.get("SHARDPLAN_UPDATE_EXAMPLES"):
        from shardplan.files import write_text

        write_text(expected, result.stdout)
    assert result.stdout == expected.read_text(), f"stderr was:\n{result.stderr}"
