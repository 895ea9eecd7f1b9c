# SPDX-License-Identifier: Apache-2.0
"""Names that torch's libraries ask of the CUDA runtime and of NCCL: the device gives them, or they are known to be
left."""

import pathlib

import pytest
import torch
from conftest import build_folder
from device_symbols import asked_of_device, not_given


def test_the_device_gives_what_torch_asks_for():
    device = build_folder() / "device" / "libshardplan_device.so"
    if not device.exists():
        pytest.skip(f"{device} is not built")
    folder = pathlib.Path(torch.__file__).parent / "lib"
    assert len(asked_of_device(folder)) > 100
    assert not_given(device, folder) == []
