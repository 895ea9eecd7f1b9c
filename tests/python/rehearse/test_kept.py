# SPDX-License-Identifier: Apache-2.0
"""`--keep`: the next run starts from a process that has imported torch, and is the same run."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from test_rehearse import SCRIPTS, rehearse

IDLE_S = "240"  # the fixture ends it


@pytest.fixture
def place():
    """A folder for sockets, whose paths are short, and the scripts; the kept process is ended."""
    folder = pathlib.Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        yield folder
    finally:
        for name in os.listdir("/proc"):
            if name.isdigit() and _is_kept(name, folder):
                os.kill(int(name), signal.SIGKILL)
        shutil.rmtree(folder)


def _is_kept(process: str, folder: pathlib.Path) -> bool:
    try:
        command = pathlib.Path(f"/proc/{process}/cmdline").read_bytes()
        return b"kept_process.serve(" in command and f"TMPDIR={folder}".encode() in pathlib.Path(
            f"/proc/{process}/environ"
        ).read_bytes().split(b"\0")
    except OSError:
        return False


def _wait_for_socket(folder: pathlib.Path) -> None:
    begin = time.monotonic()
    while not [path for path in folder.glob("shardplan-kept-*/*") if "." not in path.name]:
        assert time.monotonic() - begin < 120
        time.sleep(0.1)


def _figures(text: str) -> list[str]:
    """The printed figures, without the seconds."""
    return re.sub(r", [\d.]+ s$", "", text[text.index("rehearsed:") :], flags=re.MULTILINE).splitlines()


def test_the_next_run_is_warm_and_the_same(place):
    script = place / "train.py"
    script.write_text(
        """
import os, random, sys, torch
model = torch.nn.Linear(int(sys.argv[1]), 1024).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(64, int(sys.argv[1]), device="cuda")).sum().backward(); optimizer.step(); optimizer.zero_grad()
parent = open(f"/proc/{os.getppid()}/cmdline").read()
print("warm" if "kept_process.serve(" in parent else "cold", os.environ["ONCE"], __name__, random.random())
"""
    )
    words = (
        "--gpus", "64", "--rank", "5", "--keep", IDLE_S, "--steps", "0", "--", "torchrun", "--nproc_per_node", "8",
        script,
    )
    cold = rehearse(*words, "4096", TMPDIR=str(place), ONCE="first")
    assert cold.returncode == 0, cold.stderr
    _wait_for_socket(place)
    warm = rehearse(*words, "4096", TMPDIR=str(place), ONCE="second")
    assert warm.returncode == 0, warm.stderr
    assert _figures(warm.stdout) == _figures(cold.stdout)
    assert "warm second __main__" in warm.stdout and "cold first __main__" in cold.stdout
    other = rehearse(*words, "2048", TMPDIR=str(place), ONCE="third")
    assert other.returncode == 0 and _figures(other.stdout) != _figures(cold.stdout)
    assert len({run.stdout.split("\n")[0].split()[-1] for run in (warm, other)}) == 2  # random numbers of their own
    # The script's own ends.
    script.write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    assert rehearse(*words, "7", TMPDIR=str(place), ONCE="").returncode == 7
    script.write_text("raise KeyError(__file__)\n")
    raised = rehearse(*words, TMPDIR=str(place), ONCE="")
    assert raised.returncode == 1 and f"KeyError: '{script}'" in raised.stderr
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert rehearse(*words, TMPDIR=str(place), ONCE="").returncode == 128 + signal.SIGKILL


def test_a_folder_of_somebody_else_is_not_used(place):
    (place / f"shardplan-kept-{os.getuid()}").mkdir(mode=0o777)
    (place / f"shardplan-kept-{os.getuid()}").chmod(0o777)
    done = rehearse("--keep", IDLE_S, "--", sys.executable, SCRIPTS / "ends.py", TMPDIR=str(place))
    assert done.returncode == 3
    time.sleep(1)
    assert list((place / f"shardplan-kept-{os.getuid()}").iterdir()) == []
