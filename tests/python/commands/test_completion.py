# SPDX-License-Identifier: Apache-2.0
"""The script of `shardplan --completion` completes commands, their flags (those of programs in Python, too) and
files."""

import subprocess

import pytest
from writers import commands, program


def completed(*words: str, cwd=None) -> list[str]:
    """Completions of the last word, by bash."""
    line = " ".join(f"'{word}'" for word in (program(), *words))
    script = (
        f'eval "$({program()} --completion bash)"; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _shardplan; printf '
        f'"%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=cwd)
    return done.stdout.split()


def test_commands_are_completed():
    assert set(completed("")) == commands() | {"--help", "--version"}
    assert completed("explain-") == ["explain-memory"]


@pytest.mark.parametrize(
    ("command", "begin", "flags"),
    [("plan", "--write", ["--write-strategy"]), ("sweep", "--clus", ["--cluster"]), ("plan", "--cluster=", [])],
)
def test_flags_are_completed(command, begin, flags):
    assert completed(command, begin) == flags


def test_files_are_completed(tmp_path):
    (tmp_path / "plan.json").touch()
    assert completed("validate", "pl", cwd=tmp_path) == ["plan.json"]


def test_zsh_has_it_by_bashcompinit_and_another_shell_is_a_usage_error():
    done = subprocess.run([program(), "--completion", "zsh"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("autoload -U +X bashcompinit && bashcompinit\n")
    done = subprocess.run([program(), "--completion", "csh"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "csh" in done.stderr


def test_help_lists_commands_by_task():
    said = subprocess.run([program(), "--help"], capture_output=True, text=True, check=True).stdout
    listed = {}
    for block in said.split("\n\n"):
        head, _, rest = block.strip("\n").partition(":\n")
        listed[head.splitlines()[-1]] = {line.split()[0] for line in rest.splitlines() if line.startswith("  ")}
    tasks = ("Size a job", "Plan", "Predict", "Explain", "Train", "Convert", "Check the machine")
    assert set().union(*(listed[task] for task in tasks)) == commands()
