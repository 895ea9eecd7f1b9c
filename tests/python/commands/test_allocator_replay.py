# SPDX-License-Identifier: Apache-2.0
"""`shardplan allocator-replay` as a user meets it: exit codes, the departure, JSON, errors with their place."""

import json

import pytest
from conftest import ROOT

LOG = ROOT / "tests" / "simulator" / "allocator" / "data" / "h100_training_step.json"


def test_every_action_of_a_training_step(shardplan):
    result = shardplan("allocator-replay", LOG)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "reproduced: 14,234 of 14,234 actions" in result.stdout
    assert "no departure" in result.stdout


def test_another_setting_departs_and_says_where(shardplan, tmp_path):
    report = tmp_path / "report.json"
    result = shardplan("allocator-replay", LOG, "--max-split-size-mb", "64", "--json", report)
    assert result.returncode == 1
    assert "first departure at action 790 (/events/790)" in result.stdout
    departure = json.loads(report.read_text())["departure"]
    assert departure == {
        "action": 790,
        "pointer": "/events/790",
        "model": "a new segment of 10485760 B",
        "log": "alloc of 10485760 B at 49786945536",
    }


def test_json_alone_on_standard_output(shardplan):
    result = shardplan("allocator-replay", LOG, "--json", "-")
    report = json.loads(result.stdout)
    assert (report["actions"], report["reproduced"], report["departure"]) == (14234, 14234, None)
    assert report["final_reserved_bytes"] == 61025026048


@pytest.mark.parametrize(
    "arguments", [["--max-split-size-mb", "6"], ["--alloc-conf", "expandable:True"], ["--memory-fraction", "0.5"]]
)
def test_wrong_settings_are_usage_errors(shardplan, arguments):
    result = shardplan("allocator-replay", LOG, *arguments)
    assert result.returncode == 2
    assert "expected" in result.stderr


def test_damaged_files_name_file_and_place(shardplan, tmp_path):
    path = tmp_path / "log.json"
    path.write_text(LOG.read_text()[:1000])
    result = shardplan("allocator-replay", path)
    assert result.returncode == 3
    assert f"{path}: byte 1001" in result.stderr
    log = json.loads(LOG.read_text())
    log["events"][3][0] = "allocate"
    path.write_text(json.dumps(log))
    result = shardplan("allocator-replay", path)
    assert result.returncode == 3
    assert "/events/3/0" in result.stderr and '"allocate"' in result.stderr and "segment_alloc" in result.stderr
    assert shardplan("allocator-replay", tmp_path / "none.json").returncode == 3
