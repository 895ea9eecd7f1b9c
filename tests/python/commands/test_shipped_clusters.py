# SPDX-License-Identifier: Apache-2.0
"""The shipped cluster documents: what each has, and that tools/clusters/make_clusters.py makes them of what is in the
repository."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, build_folder

FOLDER = ROOT / "tools" / "clusters"
DOCUMENTS = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_a_device_says_how_many_multiprocessors_it_has(path):
    assert json.loads(path.read_text())["device"]["multiprocessors"] in (108, 132, 148)


def test_the_documents_are_made_of_what_is_in_the_repository(tmp_path):
    program = [sys.executable, FOLDER / "make_clusters.py", build_folder() / "bin" / "shardplan", tmp_path]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    made = {path.name: path.read_text() for path in tmp_path.glob("*.json")}
    assert made.keys() == {path.name for path in DOCUMENTS if "_2023_" not in path.name}
    assert made == {name: (FOLDER / name).read_text() for name in made}
