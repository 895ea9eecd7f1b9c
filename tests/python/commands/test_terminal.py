# SPDX-License-Identifier: Apache-2.0
"""Colours and bars: at a terminal (a pseudo-terminal here), and nowhere else."""

import os
import pty
import re
import subprocess
import sys
import threading

import pytest
from conftest import ROOT, build_folder

THREE = ROOT / "examples" / "three_layers"
RED = "\x1b[1;31m"


def at_a_terminal(*command: object, **environment: str) -> tuple[int, str]:
    """Exit code, and what standard error showed."""
    ours, theirs = pty.openpty()
    shown = []

    def read() -> None:
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # nobody has the other end any more
                return
            if not data:
                return
            shown.append(data)

    own = {
        "PATH": os.environ["PATH"], "SHARDPLAN_PYTHON": sys.executable, "SHARDPLAN_BUILD": str(build_folder()),
        "TERM": "xterm", **environment,
    }
    process = subprocess.Popen(
        [str(build_folder() / "bin" / "shardplan"), *map(str, command)],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=own,
    )
    os.close(theirs)
    reader = threading.Thread(target=read)
    reader.start()
    code = process.wait(timeout=120)
    reader.join(timeout=10)
    os.close(ours)
    return code, b"".join(shown).decode()


@pytest.mark.parametrize(
    "command", [("validate", "/nowhere.json"), ("trace", "nowhere.json")], ids=lambda words: words[0]
)
def test_an_error_is_red_at_a_terminal_alone(command, shardplan):
    code, shown = at_a_terminal(*command)
    assert code == 3 and RED + "shardplan" in shown and "\x1b[0m" in shown
    plain = shardplan(*command)
    assert plain.returncode == 3 and "\x1b" not in plain.stderr
    without = re.sub("\x1b\\[[0-9;]*m", "", shown).replace("\r\n", "\n")
    assert without.splitlines()[-1] == plain.stderr.splitlines()[-1]
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": ""}):
        code, shown = at_a_terminal(*command, **environment)
        assert code == 3 and "\x1b" not in shown, environment


def test_names_cannot_bring_colours(tmp_path):
    code, shown = at_a_terminal("validate", tmp_path / "\x1b[32mgreen", NO_COLOR="1")
    assert code == 3 and "\x1b" not in shown and "\\x1b[32mgreen" in shown


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    def run(**environment):
        words = ["sweep", THREE / "trace.json", "--ranks", "2,4,8", "--policy", "fsdp1,fsdp2", "--jobs", "1"]
        return at_a_terminal(*words, "-o", tmp_path_factory.mktemp("sweep") / "rows.csv", **environment)

    return run


def test_a_sweep_shows_how_far_it_is(sweep):
    code, shown = sweep()
    assert code == 0, shown
    bars = re.findall(r"\r\x1b\[Ksweep \[(=*)>? *\] +(\d+) %  (\d+:\d\d) left  (\d+) of 6", shown)
    assert bars and shown.rindex("\r\x1b[K") > shown.rindex("left"), "the bar goes at the end"
    for full, percent, _, done in bars:
        assert len(full) == int(24 * int(done) / 6) and abs(int(percent) - 100 * int(done) / 6) <= 0.5
    code, shown = sweep(TERM="dumb")
    assert code == 0 and "\r\x1b" not in shown and "6 of 6" in shown


def test_a_search_shows_how_many_plans_it_has_made(tmp_path):
    words = (
        "optimize", THREE / "trace.json", "--cluster", THREE / "cluster.json", "--memory-budget", "700MiB", "-o",
        tmp_path / "plan.json",
    )
    code, shown = at_a_terminal(*words)
    assert code == 0, shown
    assert "best so far" in shown
    for line in shown.replace("\r\x1b[K", "\n").splitlines():
        assert (
            not line
            or line.startswith("shardplan: ")
            or re.fullmatch(r"optimize \[=*>? *\] +\d+ %  \d:\d\d left  \d+ of 1500 plans at most", line)
        ), line


@pytest.mark.parametrize(
    ("done", "total", "passed_s", "text"),
    [
        (1, 4, 10.0, "[======>                 ]  25 %  0:30 left"),
        (4, 4, 10.0, "[========================] 100 %  0:00 left"),
        (1, 100, 60.0, "[>                       ]   1 %  1:39 h left"),
        (0, 4, 10.0, "[>                       ]   0 %  0:00 left"),
    ],
)
def test_the_text_of_a_bar(done, total, passed_s, text):
    from shardplan.terminal import bar_text

    assert bar_text(done, total, passed_s) == text
