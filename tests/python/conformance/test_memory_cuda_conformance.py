# SPDX-License-Identifier: Apache-2.0
"""The allocator's statistics at every hook, against recordings of real FSDP1 and FSDP2 on PyTorch's own allocator; and
that a difference is found."""

import copy

import pytest
from conftest import ROOT, build_folder
from memory_cases import compute_all

from shardplan_conformance import memory, memory_cuda

FOLDER = ROOT / "tests" / "conformance" / "memory_cuda"
CASES = memory.read_cases(FOLDER, [])


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """The output of `memory --rows` for every case, by its name."""
    return compute_all(FOLDER, CASES, tmp_path_factory)


def test_there_are_recordings_of_both_policies_and_both_devices():
    assert {(case["knobs"]["policy"], case["knobs"]["device"]) for case in CASES} >= {
        ("fsdp1", "fast"), ("fsdp1", "slow"), ("fsdp2", "fast"),
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_every_row_and_the_peaks_agree(computed, case):
    assert memory_cuda.first_difference(case, computed[case["case"]]) is None


@pytest.mark.parametrize("column", ["rounded", "requested", "allocated", "active", "reserved", "segments"])
def test_a_number_that_is_off_is_found(computed, column):
    for case in CASES:
        changed = copy.deepcopy(case)
        row = changed["rows"][-7]
        row[case["columns"].index(column)] += 1
        found = memory_cuda.first_difference(changed, computed[case["case"]])
        assert found is not None and f"{column} " in found and "(-1)" in found


def test_missing_and_other_rows_and_other_peaks_are_found(computed):
    case = CASES[0]
    rows = computed[case["case"]]
    assert "no such row" in memory_cuda.first_difference(case, {**rows, "rows": rows["rows"][:-1]})
    assert "not in the recording" in memory_cuda.first_difference(
        case, {**rows, "rows": [*rows["rows"], rows["rows"][-1]]}
    )
    assert "found" in memory_cuda.first_difference(case, {**rows, "rows": rows["rows"][1:]})
    for name in ("peak_reserved_bytes", "peak_active_bytes", "device_allocs", "retries"):
        changed = copy.deepcopy(rows)
        changed["allocator"][name] += 1
        assert "over all steps" in memory_cuda.first_difference(case, changed)
    assert "out of memory" in memory_cuda.first_difference(
        case, {**rows, "allocator": {**rows["allocator"], "out_of_memory": True}}
    )


def test_what_the_construction_left_spares_a_call_of_the_driver_and_no_more(computed):
    """Before its first step this recording has a segment more than the plan, which is free in part."""
    case = next(case for case in CASES if case["case"] == "f1_1b_uncompacted")
    rows = computed[case["case"]]
    recorded = max(step["device_allocs"] for step in case["peak"])
    assert rows["allocator"]["device_allocs"] == recorded + 1
    assert memory_cuda.first_difference(case, rows) is None
    for other in (recorded - 1, recorded + 2):
        changed = {**rows, "allocator": {**rows["allocator"], "device_allocs": other}}
        assert "device_allocs" in memory_cuda.first_difference(case, changed)
    compacted = {**case, "knobs": {**case["knobs"], "compact": True}}
    assert "device_allocs" in memory_cuda.first_difference(compacted, rows)


def test_the_pace_of_the_device_decides_what_is_reserved(tmp_path):
    """A slow device's recording is not what a fast one's plan reserves: the option has an effect."""
    case = next(case for case in CASES if case["knobs"]["device"] == "slow")
    fast = {**case, "knobs": {**case["knobs"], "device": "fast"}}
    memory.trace_case(FOLDER, case, tmp_path / "trace.json")
    program = str(build_folder() / "bin" / "shardplan")
    assert (
        memory_cuda.first_difference(case, memory.compute(program, tmp_path / "trace.json", fast, tmp_path)) is not None
    )
