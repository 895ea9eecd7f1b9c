# SPDX-License-Identifier: Apache-2.0
"""A rewrite that is killed at random moments goes on where it was, and ends with the state that it began with.

    PYTHONPATH=tests/python/checkpoints .venv/bin/python tests/python/checkpoints/killed.py
        [--kills 20] [--seed 1] [--megabytes 64] [--rounds 1]
"""

import argparse
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from states import equal, load_distributed, save_distributed, tensors_of

JOURNAL = ".shardplan-checksums"
ROOT = pathlib.Path(__file__).resolve().parents[3]


def large_state(megabytes: int) -> dict:
    generator = torch.Generator().manual_seed(megabytes)
    rows = megabytes * 1024 // 8
    return {"model": {f"layers.{i}.w": torch.randn(rows, 32, generator=generator) for i in range(8)}, "epoch": 3}


def run(command: list[str], seconds: float | None, when: Callable[[], bool] = lambda: True) -> str | None:
    """The command's output. None: it was killed with all its threads, so many seconds after `when` came true."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not when() and process.poll() is None:
        time.sleep(0.001)
    try:
        said, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return None
    if process.returncode != 0:
        raise AssertionError(errors)
    return said


def went_on(said: str) -> bool:
    return "from a run that was ended" in said


def lines_noted(partial: pathlib.Path) -> int:
    """Lines that note what is written, for a run that goes on. The first says of which run."""
    try:
        return (partial / JOURNAL).read_bytes().count(b"\n")
    except OSError:
        return 0


def kill_and_go_on(folder: pathlib.Path, kills: int, seed: int, megabytes: int) -> dict:
    """Counts: kills that hit a run, runs that ended with bytes of one that was killed. The last kill comes when some of
    it is written."""
    r = random.Random(seed)
    before = large_state(megabytes)
    save_distributed(before, folder / "a")
    build = pathlib.Path(os.environ.get("SHARDPLAN_BUILD", ROOT / "build" / "dev")).resolve()
    target = folder / "b"
    command = [
        str(build / "bin" / "shardplan"), "reshard-checkpoint", str(folder / "a"), str(target), "--layout", "flat",
        "--world-size", "3", "-q", "--budget", "64KiB",
    ]
    begin = time.monotonic()
    run(command, None)
    whole_run = time.monotonic() - begin
    wanted = {path.name: path.read_bytes() for path in target.iterdir() if path.name != JOURNAL}
    shutil.rmtree(target)
    counts = {"killed": 0, "resumed": 0}
    partial = folder / ".shardplan-b.partial"
    while counts["killed"] < kills:
        last = counts["killed"] == kills - 1
        before_run = max(1, lines_noted(partial))
        said = (
            run(command, 0, lambda least=before_run: lines_noted(partial) > least)
            if last
            else run(command, r.uniform(0, whole_run))
        )
        if said is not None:
            counts["resumed"] += went_on(said)
            shutil.rmtree(target)
            continue
        counts["killed"] += 1
        assert target.exists() != partial.exists() or not target.exists(), "whole or absent"
        if target.exists():
            shutil.rmtree(target)
            counts["killed"] -= last  # it was done already
        elif not last and r.random() < 0.3 and partial.exists():
            files = sorted(path for path in partial.glob("*.distcp") if path.stat().st_size)
            if files:  # the disk lost what was written
                path = r.choice(files)
                data = bytearray(path.read_bytes())
                data[r.randrange(len(data))] ^= 1
                path.write_bytes(data)
    counts["resumed"] += went_on(run(command, None))
    found = {path.name: path.read_bytes() for path in target.iterdir() if path.name != JOURNAL}
    assert found == wanted, f"other bytes: SHARDPLAN_SEED={seed}"
    state = load_distributed(target, folder / "found.pt")
    assert all(equal(value, tensors_of(state)[name]) for name, value in tensors_of(before).items())
    assert not (folder / ".shardplan-b.partial").exists()
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    resumed = 0
    for seed in range(options.seed, options.seed + options.rounds):
        with tempfile.TemporaryDirectory(dir=ROOT / "out") as folder:
            counts = kill_and_go_on(pathlib.Path(folder), options.kills, seed, options.megabytes)
        print(f"seed {seed}: {counts}", flush=True)
        resumed += counts["resumed"]
    if resumed == 0:
        sys.exit(
            f"no run went on from one that was killed: {options.megabytes} MB; give more --megabytes, --kills or "
            "--rounds"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
