# SPDX-License-Identifier: Apache-2.0
"""The peak by category and module, from histories that are written out here."""

import sys

from conftest import ROOT

sys.path[:0] = [str(ROOT / "tools" / "python"), str(ROOT / "tools" / "python" / "shardplan" / "rehearse" / "site")]
from shardplan.rehearse import text
from shardplan_rehearsal.history import peak_of, rounded
from shardplan_rehearsal.phases import Known, Stretch

KIB = 1024
# Setup until 100, forward until 200, backward until 300, optimizer until 400.
STRETCHES = [
    Stretch(step, phase, 0, end, 0, 0, 0, 0)
    for step, phase, end in ((0, "setup", 100), (1, "forward", 200), (1, "backward", 300), (1, "optimizer", 400))
]


def alloc(address, size, time_us, mark="", frames=()):
    return {
        "action": "alloc",
        "addr": address,
        "size": size,
        "time_us": time_us,
        "user_metadata": mark,
        "frames": [{"filename": file, "name": name, "line": 1} for file, name in frames],
    }


def free(address, time_us, mark=""):
    return {"action": "free_requested", "addr": address, "size": 0, "time_us": time_us, "user_metadata": mark}


def test_a_block_is_what_its_owner_or_its_lifetime_says():
    trace = [
        alloc(1, 4 * KIB, 50, "0|f|"),
        alloc(2, 8 * KIB, 150, "1|f|layers.0"),  # alive in the backward
        alloc(3, 2 * KIB, 160, "1|f|layers.0"),
        free(3, 170, "1|f|layers.0"),
        alloc(4, 16 * KIB, 250, "2|b|layers.1", [("/torch/_fsdp_param.py", "init_unsharded_param")]),
        alloc(5, KIB, 255),  # autograd's thread, unmarked
        alloc(6, KIB, 256, "2|f|layers.0"),  # run again
        {"action": "oom", "device_free": 0, "time_us": 257},
        free(5, 260),
        free(2, 270),
        alloc(1, KIB, 350, "3|f|"),
    ]
    peak = peak_of(trace, STRETCHES, [Known(3, 1, "param_sharded", "layers.1")], 30 * KIB + 512)
    assert peak.categories == {
        "param_unsharded": 16 * KIB, "saved": 8 * KIB, "param_sharded": 4 * KIB, "backward_temp": KIB, "recompute": KIB,
        "rounding": 512,
    }
    assert peak.modules == {"layers.1": 20 * KIB, "layers.0": 9 * KIB, "": KIB}
    assert (peak.stretch, peak.module) == (2, "layers.0")
    assert max(size for _, size in peak.curve) == 30 * KIB


def test_an_address_counts_for_the_block_that_was_there():
    trace = [alloc(1, KIB, 150, "1|f|a"), free(1, 160, "1|f|a"), alloc(1, 4 * KIB, 250, "2|f|")]
    peak = peak_of(trace, STRETCHES, [Known(1, 1, "param_sharded", "a")], 4 * KIB)
    assert "param_sharded" not in peak.categories


def test_an_old_mark_of_a_thread_is_not_believed():
    peak = peak_of([alloc(1, KIB, 350, "1|b|layers.7")], STRETCHES, [], KIB)
    assert (peak.stretch, peak.module) == (3, "")


def test_nothing_allocated_has_no_peak():
    assert peak_of([], STRETCHES, [], 0) is None


def test_requests_are_rounded_as_the_allocator_does():
    assert [rounded(size) for size in (0, 1, 512, 513)] == [512, 512, 512, 1024]


def test_repeated_blocks_are_one_row():
    assert text.grouped({"layers.0.up": 1, "layers.11.up": 2, "head2": 5, "3": 1, "4": 1}) == {
        "head2": 5, "layers.*.up": 3, "*": 2,
    }


def test_steps_that_take_the_same_are_one_row():
    stretches = [
        {
            "step": step, "phase": phase, "allocated_bytes": size, "reserved_bytes": size, "retries": 0,
            "out_of_memory": 0,
        }
        for step, phase, size in (
            (0, "setup", KIB),
            (1, "forward", KIB),
            (2, "forward", 1 << 20),
            (3, "forward", 1 << 20),
            (4, "forward", 1 << 30),
        )
    ]
    assert [row[:3] for row in text.table_of({"stretches": stretches})[1:]] == [
        ("", "setup", "1.00 KiB"),
        ("1", "forward", "1.00 KiB"),
        ("2-3", "forward", "1.00 MiB"),
        ("4", "forward", "1.00 GiB"),
    ]


def test_an_error_of_a_hub_says_what_to_do():
    error = {
        "type": "LocalEntryNotFoundError", "kinds": ["LocalEntryNotFoundError", "FileNotFoundError"],
        "message": "no\nsecond line", "place": "setup", "file": "train.py", "line": 3, "module": "",
    }
    assert (
        text.error_line(error)
        == (
            "error: the script raised LocalEntryNotFoundError in setup, train.py:3: no (it needs a hub: download the "
            "model and data first, and name their folders; or let it, with a network)"
        )
    )
    assert "hub" not in text.error_line({**error, "kinds": ["ValueError"]})
