# SPDX-License-Identifier: Apache-2.0
"""Serial mode is the reference: programs that race give the numbers of the host's order. Lazy mode shows wrong ones."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from conftest import build_folder

PROGRAM = pathlib.Path(__file__).with_name("sums.py")
RIGHT = 3.0 * (1 << 20)
SEEDS = range(6)


def numbers(mode):
    library = build_folder() / "device" / "libshardplan_device.so"
    if not library.exists():
        pytest.skip(f"no {library}: torch has no CUDA, or the build has sanitizers")
    done = subprocess.run(
        [sys.executable, PROGRAM],
        capture_output=True, text=True, timeout=120, check=True,
        env={
            **os.environ, "LD_PRELOAD": str(library), "SHARDPLAN_DEVICE_MODE": mode,
            "LD_LIBRARY_PATH": f"{library.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        },
    )  # fmt: skip
    return json.loads(done.stdout)


def test_serial_mode_gives_the_numbers_of_the_hosts_order():
    assert set(numbers("serial").values()) == {RIGHT}


def test_lazy_mode_shows_every_race_as_a_wrong_number():
    wrong = set()
    for seed in SEEDS:
        wrong |= {name for name, total in numbers(f"lazy:{seed}").items() if total != RIGHT}
    assert wrong == {"unordered", "not_awaited", "freed", "offloaded"}
