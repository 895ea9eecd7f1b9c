# SPDX-License-Identifier: Apache-2.0
"""Memory at every hook, against recordings of real FSDP2 steps; and that a difference is found."""

import copy
import json
import random

import pytest
from conftest import ROOT
from memory_cases import compute_all

from shardplan_conformance import memory

FOLDER = ROOT / "tests" / "conformance" / "memory"
CASES = memory.read_cases(FOLDER, [])


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """Rows of every case, by its name."""
    return compute_all(FOLDER, CASES, tmp_path_factory)


def test_there_are_recordings():
    assert len(CASES) == 10


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_every_row_and_the_peak_agree_byte_for_byte(computed, case):
    assert memory.first_difference(case, computed[case["case"]]) is None


def test_a_recording_that_is_one_byte_off_is_found(computed):
    for case in CASES:
        for row in (0, len(case["timeline"]) // 2, len(case["timeline"]) - 2):
            changed = copy.deepcopy(case)
            changed["timeline"][row][3] += 1
            assert "(-1)" in memory.first_difference(changed, computed[case["case"]])
            changed = copy.deepcopy(case)
            values = changed["timeline"][row]
            values[next(i for i in range(4, len(values)) if values[i])] += 1
            assert "instead of" in memory.first_difference(changed, computed[case["case"]])


def test_missing_and_extra_rows_and_another_peak_are_found(computed):
    case = CASES[0]
    rows = computed[case["case"]]
    shorter = copy.deepcopy(case)
    del shorter["timeline"][10]
    assert memory.first_difference(shorter, rows) is not None
    assert "no such row" in memory.first_difference(case, {**rows, "rows": rows["rows"][:-1]})
    peak = copy.deepcopy(case)
    peak["peak"]["step2"]["unit"] = "layers.0"
    assert memory.first_difference(peak, rows).startswith("peak: in the")
    peak["peak"]["step2"]["total"] += 512
    assert memory.first_difference(peak, rows).startswith("peak: total")
    # Or that of the engine's sums in place.
    recorded = case["peak"]["step2"]
    at = [recorded["phase"], recorded["unit"], "", recorded["op"]]
    peak["peak_engine_sums_in_place"] = {"step2": recorded["total"], "step2_by_tag": recorded["by_tag"], "step2_at": at}
    assert memory.first_difference(peak, rows) is None


def test_a_missing_or_damaged_recording_is_named(tmp_path, capsys):
    (tmp_path / "model.py").write_text("")
    assert memory.run(tmp_path, "shardplan", []) == 3
    assert f"{tmp_path}: no recorded memory case" in capsys.readouterr().err
    whole = (FOLDER / "default.json").read_text()
    (tmp_path / "default.json").write_text(whole[: len(whole) // 2])
    assert memory.run(tmp_path, "shardplan", []) == 3
    assert f"{tmp_path}/default.json: " in capsys.readouterr().err
    (tmp_path / "default.json").write_text(whole)
    assert memory.run(tmp_path, "shardplan", ["no_such_case"]) == 3
    assert "has no recording no_such_case.json" in capsys.readouterr().err
    (tmp_path / "default.json").write_text("{}")
    assert memory.run(tmp_path, "shardplan", ["default"]) == 3
    assert f"{tmp_path}/default.json: no recorded memory case" in capsys.readouterr().err


def test_the_command_prints_a_table_and_writes_rows(shardplan, tmp_path):
    case = next(c for c in CASES if c["case"] == "default")
    memory.trace_case(FOLDER, case, tmp_path / "trace.json")
    (tmp_path / "strategy.json").write_text(json.dumps(memory.strategy_of(case)))
    given = ["memory", tmp_path / "trace.json", "--strategy", tmp_path / "strategy.json", "--ranks", "8"]
    table = shardplan(*given, "--no-kernel-temporaries")
    assert table.returncode == 0, table.stderr
    assert f"total {case['peak']['step2']['total']}" in " ".join(table.stdout.split())
    assert "peak in the backward, layers.1" in table.stdout
    rows = shardplan(*given, "--rows", "-", "-q", "--no-kernel-temporaries")
    assert json.loads(rows.stdout)["peak"]["total_bytes"] == case["peak"]["step2"]["total"]
    # Memory inside of kernels comes on top, as categories of its own.
    with_kernels = json.loads(shardplan(*given, "--rows", "-", "-q").stdout)
    extra = dict(zip(with_kernels["categories"], with_kernels["peak"]["by_category"], strict=True))
    kernels = extra["kernel_temp"] + extra["cublas_workspace"]
    assert extra["cublas_workspace"] == 2 * 32 * 2**20
    assert with_kernels["peak"]["total_bytes"] >= case["peak"]["step2"]["total"] + kernels - extra["kernel_temp"]
    assert shardplan("memory", tmp_path / "strategy.json").returncode == 3


def places(value, path=()):
    """Every value below `value`, by its path."""
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


RECORDINGS = [
    (FOLDER / "default.json", ("timeline", "timeline_columns")),
    (FOLDER.parent / "memory_cuda" / "f1_tiny.json", ("rows", "columns")),
]


@pytest.mark.parametrize("recording, table", RECORDINGS, ids=lambda value: getattr(value, "stem", ""))
def test_damage_is_refused_with_its_place(tmp_path, recording, table):
    """Members taken away and values of another kind, at places drawn at random: an error with the place, or no change
    to what is compared."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    document = json.loads(recording.read_text())
    looked_at = ("knobs", "model", *table, "peak")
    everywhere = {key: list(places(document[key], (key,))) for key in looked_at}
    refused = 0
    for number in range(300):
        *path, key = draw.choice(everywhere[draw.choice(looked_at)])
        changed = copy.deepcopy(document)
        holder = changed
        for step in path:
            holder = holder[step]
        change = draw.randrange(4)
        if change == 0:
            holder.pop(key)
        else:
            holder[key] = (None, {"a": []}, -7)[change - 1]
        (tmp_path / "case.json").write_text(json.dumps(changed))
        (case,) = memory.read_cases(tmp_path, ["case"])
        if isinstance(case, memory.BadRecording):
            refused += 1
            assert f"{tmp_path}/case.json: " in str(case), (seed, number)
        else:  # what reads well is compared
            memory.strategy_of(case), memory.trace_key(case)
            compare = memory.memory_cuda.first_difference if "rows" in case else memory.first_difference
            compare(case, {"rows": [], "categories": [], "peak": {}, "allocator": {"out_of_memory": False}})
    assert refused > 200
