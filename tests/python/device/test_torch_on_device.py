# SPDX-License-Identifier: Apache-2.0
"""PyTorch on the device in software: its operators, allocator, generators and errors; and that a missing wait is
seen."""

import functools
import json
import pathlib
import sys

import pytest
from conftest import on_device

# Functions by mode, in one process each. One that breaks the device comes last.
RUNS = {
    "inline": ("allocator", "training", "operators", "mistakes"),
    "lazy:1": ("training", "operators", "random_numbers", "order"),
}


@functools.cache
def results(mode: str) -> dict:
    program = pathlib.Path(__file__).with_name("torch_on_device.py")
    done = on_device([sys.executable, str(program), *RUNS[mode]], mode)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def result(name: str, mode: str):
    return results(mode)[name]


@pytest.mark.parametrize("mode", RUNS)
def test_training_gives_the_hosts_numbers(mode):
    assert result("training", mode) == []


@pytest.mark.parametrize("mode", RUNS)
def test_operators_give_the_hosts_numbers(mode):
    assert result("operators", mode) == []


def test_generators_follow_seed_and_state():
    assert all(result("random_numbers", "lazy:1").values()), result("random_numbers", "lazy:1")


def test_memory_is_counted_by_the_real_allocator():
    assert result("allocator", "inline") == {
        "allocated": 4096 + (3 << 20),
        "reserved": (2 << 20) + (20 << 20),
        "reserved by a small block": 2 << 20,
        "used of the device": 2 << 20,
        "out of memory": 1,
    }


def test_mistakes_are_errors_that_say_what():
    said = result("mistakes", "inline")
    assert said["mixed devices"].startswith("Expected all tensors to be on the same device")
    assert "spin_kernel" in said["no such kernel"]
    assert "aten::index_select: index out of range" in said["index out of range"]


def test_what_the_host_forgot_to_order_is_seen():
    found = result("order", "lazy:1")
    assert all(found["waited"]) and all(found["recorded"])
    assert not all(found["not waited"])
    assert not all(found["not recorded"])
