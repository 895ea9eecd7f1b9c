# SPDX-License-Identifier: Apache-2.0
"""`shardplan doctor` finds what is there, and says what to do about what is not, crashes and hangs included."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, build_folder

sys.path.append(str(ROOT / "tools" / "python"))
from shardplan import versions  # noqa: E402
from shardplan.doctor import checks, cli  # noqa: E402
from shardplan.doctor.checks import Check, Finding  # noqa: E402

PROGRAM = build_folder() / "bin" / "shardplan"


def test_this_machine_is_ready(monkeypatch):
    if not (build_folder() / "bin" / "shardplan-run").exists():
        pytest.skip("no executor in this build")
    environment = os.environ | {"SHARDPLAN_PYTHON": sys.executable, "SHARDPLAN_BUILD": str(build_folder())}
    done = subprocess.run(
        [PROGRAM, "doctor", "--timeout", "240"], capture_output=True, text=True, timeout=1200, env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line[6:22].strip(): line[:4].strip() for line in done.stdout.splitlines() if line[:4].strip()}
    assert {name for name, state in rows.items() if state == "ok"} >= {
        "programs", "python", "torch", "shardplan.torch", "Gloo",
    }


def test_programs_that_are_not_there_are_missed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SHARDPLAN_PROGRAMS", str(tmp_path))
    monkeypatch.setattr(cli, "CHECKS", tuple(check for check in checks.CHECKS if check.name == "programs"))
    monkeypatch.setattr(sys, "argv", ["doctor"])
    assert cli.main() == 4
    said = capsys.readouterr().out
    assert said.startswith("FAIL  programs") and "tools/build dev" in said and said.endswith("not ready: programs\n")


def test_a_build_without_the_executor_is_told(tmp_path, monkeypatch):
    program = tmp_path / "shardplan"
    program.write_text(f"#!/bin/sh\necho {versions.__version__}\n")
    program.chmod(0o755)
    monkeypatch.setenv("SHARDPLAN_PROGRAMS", str(tmp_path))
    finding = cli._programs()
    assert finding.state == "missing" and "not built: shardplan-run" in finding.found


@pytest.mark.parametrize(
    ("body", "limit", "state", "words"),
    [
        ("raise OSError('no such library')", 120, "broken", "OSError: no such library"),
        ("import os; os.abort()", 120, "broken", "ended with code -6"),
        ("import time; time.sleep(600)", 2, "broken", "did not end within 2 s"),
        ("return Finding('missing', 'not there')", 120, "missing", "not there"),
    ],
)
def test_what_fails_crashes_or_hangs_is_a_finding(tmp_path, monkeypatch, body, limit, state, words):
    """A checks module with one more check, as a process finds it."""
    package = tmp_path / "shardplan" / "doctor"
    package.mkdir(parents=True)
    (tmp_path / "shardplan" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    for name in ("building", "files.py", "installing.py"):
        source = ROOT / "tools" / "python" / "shardplan" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / "shardplan" / name)
    source = (ROOT / "tools" / "python" / "shardplan" / "doctor" / "checks.py").read_text()
    source = source.replace(
        "CHECKS = (", f"def _odd():\n    {body}\n\n\nCHECKS = (\n    Check('odd', _odd, True, 'do this'),", 1
    )
    (package / "checks.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = cli._found(Check("odd", None, True, "do this"), limit)
    assert isinstance(finding, Finding)
    assert (finding.state, finding.advice) == (state, "do this" if state == "broken" else "")
    assert words in finding.found
