# SPDX-License-Identifier: Apache-2.0
"""The recordings that formulas of kernels' memory are compared with are what PyTorch's host code does."""

import json
import sys

from conftest import ROOT, installed_pytorch, on_device


def test_recordings_are_what_the_allocator_sees():
    program = ROOT / "tests" / "python" / "device" / "record_kernels.py"
    done = on_device([sys.executable, str(program)], "null", SHARDPLAN_DEVICE_COUNT="1")
    assert done.returncode == 0, done.stderr[-3000:]
    recorded = ROOT / "tests" / "simulator" / f"kernels_{installed_pytorch().replace('.', '')}.json"
    assert json.loads(done.stdout) == json.loads(recorded.read_text())
