# SPDX-License-Identifier: Apache-2.0
"""`shardplan conformance` is a command of a checkout: its program lies among the tests, and no wheel has it."""

import os
import shutil
import subprocess
import sys

from conftest import ROOT

from shardplan import command

PACKAGE = ROOT / "tools" / "python" / "shardplan"


def test_a_checkout_has_the_program_among_its_tests():
    assert command.tests_of_repository("shardplan_conformance") == ROOT / "tests" / "python"
    assert command.tests_of_repository("no_such_package") is None


def test_a_checkout_runs_it(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-m", "shardplan.conformance", "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.startswith("usage: shardplan conformance"), done.stderr


def test_an_installed_package_says_that_it_is_a_command_of_the_repository(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "site" / "shardplan", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    for arguments in (["--random", "1"], ["--help"], []):
        program = [sys.executable, "-m", "shardplan.conformance", *arguments]
        done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and "a command of the source repository" in done.stderr, done.stderr
