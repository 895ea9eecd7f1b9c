# SPDX-License-Identifier: Apache-2.0
"""tools/shardplan in a clone where nothing is built: help, the version and wrong arguments build nothing; what has to
build says so."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, build_folder

PAGES = ROOT / "docs" / "reference" / "help"


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> pathlib.Path:
    """A copy of the files that tools/shardplan reads, with a tools/build that leaves a mark."""
    root = tmp_path_factory.mktemp("a clone")
    (root / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "shardplan", root / "tools")
    shutil.copy(ROOT / "CMakeLists.txt", root)
    shutil.copytree(PAGES, root / "docs" / "reference" / "help")
    build = root / "tools" / "build"
    build.write_text(
        '#!/bin/sh\nroot=$(dirname "$0")/..\necho "$@" > "$root/built"\nmkdir -p "$root/build/$1/bin"\nprintf '
        '\'#!/bin/sh\\necho ran\\nrm -r "%s"\\n\' "$root/build" > "$root/build/$1/bin/shardplan"\nchmod +x '
        '"$root/build/$1/bin/shardplan"\n'
    )
    build.chmod(0o755)
    return root


def run(clone: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess:
    (clone / "built").unlink(missing_ok=True)
    return subprocess.run([clone / "tools" / "shardplan", *arguments], capture_output=True, text=True, check=False)


def test_the_texts_are_what_the_program_says():
    if not (build_folder() / "bin" / "shardplan-run").exists():
        pytest.skip("no executor in this build: run has no help")
    environment = {**os.environ, "SHARDPLAN_BUILD": str(build_folder())}
    done = subprocess.run(
        [sys.executable, ROOT / "dev" / "update_help", "--check"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr


COMMANDS = sorted(path.stem for path in PAGES.glob("*.txt") if path.stem != "shardplan")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_there_without_a_build(clone, command):
    for flag in ("--help", "-h"):
        done = run(clone, command, "x", flag)
        assert (
            done.returncode == 0
            and done.stdout == (PAGES / f"{command}.txt").read_text()
            and not (clone / "built").exists()
        )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_the_help_is_taken(clone, command):
    """None is refused: what a build would take is not turned away before it."""
    pages = [page for page in (PAGES / f"{command}.txt", PAGES / "all" / f"{command}.txt") if page.exists()]
    text = "".join(page.read_text() for page in pages)
    flags = sorted(set(re.findall(r"(?<![a-z0-9-])--[a-z][a-z0-9-]*", text)) - {"--help", "--help-all"})
    done = run(clone, command, "x", *flags)
    assert (clone / "built").exists() and done.stdout == "ran\n", done.stderr


def test_the_program_itself(clone):
    assert run(clone, "--help").stdout == (PAGES / "shardplan.txt").read_text()
    version = subprocess.run(
        [build_folder() / "bin" / "shardplan", "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert run(clone, "--version").stdout == version and not (clone / "built").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "a command is missing"),
        (["plam", "x"], "no such command: plam"),
        (["shardplan"], "no such command: shardplan"),
        (["../../../CMakeLists"], "no such command"),
        (["--no-such"], "no such option: --no-such"),
        (["plan", "trace.json", "--no-such", "1"], "plan: no such option: --no-such"),
        (["plan", "trace.json", "--no-such=1"], "plan: no such option: --no-such"),
        (["trace", "x.json", "--sequence", "1"], "trace: no such option: --sequence"),
        (["plan"], "plan: an argument is missing"),
        (["simulate", "-q"], "simulate: an argument is missing"),
        (["trace", "-q"], "trace: an argument is missing"),
        (["sweep"], "sweep: an argument is missing"),
        (["calibrate"], "calibrate: an argument is missing"),
        (["conformance"], "conformance: an argument is missing"),
    ],
)
def test_wrong_arguments_build_nothing(clone, arguments, says):
    done = run(clone, *arguments)
    assert done.returncode == 2 and says in done.stderr and done.stdout == "" and not (clone / "built").exists()


@pytest.mark.parametrize(
    ("arguments", "preset"),
    [(["plan", "t.json", "-q"], "core"), (["trace", "m.json"], "dev"), (["sweep", "t.json"], "dev")],
)
def test_what_has_to_build_says_so(clone, arguments, preset):
    done = run(clone, *arguments)
    assert done.returncode == 0 and done.stdout == "ran\n" and (clone / "built").read_text().split()[0] == preset
    assert "nothing is built yet" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_shell_that_asks_for_completion_builds_nothing(clone):
    done = run(clone, "--completion", "bash")
    assert (
        done.returncode == 4
        and done.stdout == ""
        and "nothing is built yet" in done.stderr
        and not (clone / "built").exists()
    )


def test_setup_knows_what_the_environment_holds(tmp_path):
    """A product's build takes an environment with or without the packages of tests; a build of the tests takes the
    second alone."""
    (tmp_path / "tools").mkdir()
    (tmp_path / ".venv").mkdir()
    for name in ("setup", "requirements.txt", "requirements-tests.txt"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools" / name)
    product, tests = (
        (tmp_path / "tools" / name).read_text() for name in ("requirements.txt", "requirements-tests.txt")
    )

    def there(*arguments):
        return (
            subprocess.run(
                [tmp_path / "tools" / "setup", "--there", *arguments], capture_output=True, check=False
            ).returncode
            == 0
        )

    assert (there(), there("--product")) == (False, False)
    for stamp, expected in (
        (product, (False, True)),
        (product + tests, (True, True)),
        (product[:-1], (False, False)),
        (product.replace("torch==2", "torch==1") + tests, (False, False)),
    ):
        (tmp_path / ".venv" / "requirements.stamp").write_text(stamp)
        assert (there(), there("--product")) == expected
    assert subprocess.run([tmp_path / "tools" / "setup", "--prodct"], capture_output=True, check=False).returncode == 2


@pytest.mark.parametrize("command", ["plan", "memory", "optimize"])
def test_rarely_set_knobs_are_behind_help_all(clone, command):
    """The first screen has what pages, tests and examples name; the whole text is one flag away, built or not."""
    first, whole = (run(clone, command, flag) for flag in ("--help", "--help-all"))
    assert (first.returncode, whole.returncode) == (0, 0), whole.stderr
    flags = [set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)) for text in (first.stdout, whole.stdout)]
    rare = flags[1] - flags[0]
    assert "--unit" in flags[0] and flags[0] <= flags[1]
    assert f"{len(rare)} more knobs, rarely set: --help-all" in first.stdout
    assert "--share-comm-context" in rare and "--predivide-factor" in rare


def test_a_rarely_set_knob_is_known_before_anything_is_built(clone):
    assert "no such option" not in run(clone, "plan", "trace.json", "--shard-over", "dp").stderr
    assert "no such option: --shard-ovver" in run(clone, "plan", "trace.json", "--shard-ovver", "dp").stderr
