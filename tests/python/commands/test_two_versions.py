# SPDX-License-Identifier: Apache-2.0
"""Two versions of shardplan on one path, and a command for another processor: an error that says what to do, never a
traceback."""

import os
import pathlib
import subprocess
import sys

import pytest
from conftest import ROOT, build_folder

from shardplan import versions
from shardplan.doctor import checks

# The first bytes of a program for a processor that nobody has.
FOREIGN = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xef\xbe\x01\x00\x00\x00" + bytes(40)


def program(folder: pathlib.Path, body: bytes | str) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "shardplan"
    path.write_bytes(body if isinstance(body, bytes) else f"#!/bin/sh\n{body}\n".encode())
    path.chmod(0o755)
    return str(path)


def run(*words: object, **environment: str) -> subprocess.CompletedProcess:
    added = {"PYTHONPATH": str(ROOT / "tools" / "python"), **environment}
    return subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False, env=os.environ | added
    )


@pytest.mark.parametrize(("body", "said"), [
    (f"echo {versions.__version__}", ""),
    ("echo 0.0.9", (
        f"is of shardplan 0.0.9, and the Python package in {ROOT / 'tools' / 'python' / 'shardplan'} is "
        f"{versions.__version__}: build again (tools/build dev), or take"
    )),
    (
        "echo \"libc.so.6: version 'GLIBC_2.34' not found\" >&2; exit 1",
        "ends with 1: libc.so.6: version 'GLIBC_2.34' not found",
    ),
    (FOREIGN, "Exec format error: it is for another processor than this"),
])  # fmt: skip
def test_a_command_that_does_not_go_with_the_package_is_named(tmp_path, body, said):
    found = versions.why_not_program(program(tmp_path, body))
    assert said in found and bool(said) == bool(found)


def test_an_installed_package_says_what_pip_is_to_do(monkeypatch):
    monkeypatch.setattr(versions, "in_checkout", lambda: False)
    assert f"pip install --force-reinstall 'shardplan-torch=={versions.__version__}'" in versions.why_not(
        "the module", "0.0.9", "shardplan-torch"
    )


SWEEP = ["-m", "shardplan.sweep", ROOT / "examples" / "models" / "gpt2.json", "--ranks", "2", "--cluster", "h100"]


@pytest.mark.parametrize(
    ("body", "said"), [("echo 0.0.9", "is of shardplan 0.0.9"), (FOREIGN, "is for another processor")]
)
def test_a_python_command_ends_with_4(tmp_path, body, said):
    program(tmp_path, body)
    done = run(sys.executable, *SWEEP, SHARDPLAN_PROGRAMS=str(tmp_path))
    assert done.returncode == 4 and said in done.stderr and "Traceback" not in done.stderr


def test_the_command_of_another_version_starts_no_python_command():
    done = run(sys.executable, "-m", "shardplan.doctor", SHARDPLAN_COMMAND_VERSION="0.0.9")
    assert done.returncode == 4 and done.stdout == ""
    assert done.stderr.startswith(
        "shardplan doctor: the command shardplan is of shardplan 0.0.9, and the Python package in "
    )


def test_the_command_names_its_version(tmp_path):
    """To the interpreter that it starts, whatever the environment had before."""
    python = program(tmp_path, 'echo "$SHARDPLAN_COMMAND_VERSION"')
    done = run(
        build_folder() / "bin" / "shardplan", "doctor", SHARDPLAN_PYTHON=python, SHARDPLAN_COMMAND_VERSION="0.0.9"
    )
    assert done.stdout == run(build_folder() / "bin" / "shardplan", "--version").stdout


def test_a_compiled_module_of_another_version_is_named(tmp_path):
    module = tmp_path / "python" / "_shardplan.py"
    module.parent.mkdir()
    module.write_text("__version__ = '0.0.9'\n")
    done = run(sys.executable, "-c", "import shardplan.torch", SHARDPLAN_BUILD=str(tmp_path))
    assert done.returncode == 1 and f"ImportError: the compiled module {module} is of shardplan 0.0.9" in done.stderr


def distribution(folder: pathlib.Path, name: str, version: str) -> None:
    made = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(("others", "state", "said"), [
    (
        [("shardplan", versions.__version__), ("shardplan-torch", f"{versions.__version__}+torch2.15")],
        "works",
        f"shardplan-torch {versions.__version__}+torch2.15",
    ),
    ([("shardplan", versions.__version__), ("shardplan", "0.0.9")], "broken", "there is shardplan 0.0.9 in "),
    (
        [("shardplan", versions.__version__), ("shardplan-torch", "0.0.9+torch2.15")],
        "broken",
        "there is shardplan-torch 0.0.9+torch2.15 in ",
    ),
])  # fmt: skip
def test_the_doctor_finds_what_is_installed_twice(tmp_path, monkeypatch, others, state, said):
    for name, version in others:
        distribution(tmp_path, name, version)
    monkeypatch.syspath_prepend(tmp_path)
    finding = checks._package()
    assert (
        finding.state == state and said in finding.found and ("pip uninstall" in finding.advice) == (state == "broken")
    )


def test_the_replayer_of_another_version_is_named():
    program_of_run = build_folder() / "bin" / "shardplan-run"
    if not program_of_run.exists():
        pytest.skip("no executor in this build")
    done = run(program_of_run, "plan.json", SHARDPLAN_COMMAND_VERSION="0.0.9")
    assert done.returncode == 4
    assert (
        f"the command shardplan is of version 0.0.9, and shardplan-run is of version {versions.__version__}: install "
        "shardplan and shardplan-torch of one"
        in done.stderr
    )
