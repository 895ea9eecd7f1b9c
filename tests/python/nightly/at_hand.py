# SPDX-License-Identifier: Apache-2.0
"""The adapter as a user of the wheel gets it: sources and library as they are installed, compiled for the torch at
hand, a training with them. dev/wheels does the same from the wheel."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, build_folder


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The package as the wheel lays it out. Its libraries are kept in build/at_hand."""
    made, build = tmp_path_factory.mktemp("site"), ROOT / "build" / "at_hand"
    options = [
        "-DSKBUILD=2", "-DSKBUILD_SCRIPTS_DIR=bin", "-DSKBUILD_DATA_DIR=data", "-DSHARDPLAN_EXECUTOR=OFF",
        "-DSHARDPLAN_TESTS=OFF", "-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_BUILD_TYPE=Release",
    ]
    for command in (
        ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *options],
        ["cmake", "--build", build, "--target", "adapter_parts"],
        ["cmake", "--install", build, "--component", "adapter", "--prefix", made],
    ):
        subprocess.run(command, check=True, capture_output=True)
    shutil.copytree(
        ROOT / "tools" / "python" / "shardplan",
        made / "shardplan",
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    return made


def run(site: pathlib.Path, *command: object) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SHARDPLAN_", "CXX"))}
    more = {
        "PYTHONPATH": str(site), "SHARDPLAN_CACHE": str(site / "cache"), "SHARDPLAN_PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }
    path = {"PATH": f"{build_folder() / 'bin'}{os.pathsep}{kept['PATH']}"}
    return subprocess.run(
        [str(word) for word in command], cwd=site, env=kept | more | path, capture_output=True, text=True, check=False
    )


def test_it_compiles_trains_and_runs(site):
    done = run(site, sys.executable, "-c", "import shardplan.torch as sp; print(sp._native.native.__file__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site / "cache" / "built")) and re.search(r"compiled in \d+ s", done.stderr)
    train = ROOT / "examples" / "port_titan" / "train.py"
    trained = run(
        site, sys.executable, ROOT / "examples" / "both_ways.py", site / "trained", "torch.distributed.fsdp", train
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    layers = ROOT / "examples" / "three_layers"
    plan = [
        "shardplan", "plan", layers / "trace.json", "--cluster", layers / "cluster.json", "--unit", "layers.*", "-q",
        "-o", site / "plan.json",
    ]
    assert run(site, *plan).returncode == 0
    for device in ("virtual", "cpu"):
        ran = run(
            site, sys.executable, "-m", "shardplan.building", site / "plan.json", "--device", device, "--compute-scale",
            "0.001",
        )
        assert ran.returncode == 0, ran.stderr
