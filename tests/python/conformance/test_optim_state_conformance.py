# SPDX-License-Identifier: Apache-2.0
"""Recordings of FSDP1's optimizer states: all match, and a change of any of them is seen."""

import json
import os
import pathlib
import shutil

import pytest
import torch
import warm
from conftest import ROOT, build_folder
from shardplan_conformance.optim_state import Differs, compare

RECORDER = pathlib.Path(__file__).with_name("optim_state_recorder.py")
FOLDER = ROOT / "tests" / "conformance" / "optim_state"


@pytest.fixture
def changed(tmp_path):
    """changed(case, file, change): what differs where change(document) was made to a copy of the case."""

    def run(case, file, change):
        shutil.copytree(FOLDER / case, tmp_path / case)
        path = tmp_path / case / file
        if file.endswith(".json"):
            document = json.loads(path.read_text())
            change(document)
            path.write_text(json.dumps(document))
        else:
            document = torch.load(path, weights_only=True)
            change(document)
            torch.save(document, path)
        with pytest.raises(Differs) as differs:
            compare(tmp_path / case, build_folder() / "bin" / "shardplan")
        return str(differs.value)

    return run


def test_every_recorded_state_is_reproduced(shardplan):
    done = shardplan("conformance", FOLDER)
    cases = sorted(path.name for path in FOLDER.iterdir())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"matched {len(cases)} of {len(cases)} cases"
    assert [line.split(":")[0] for line in done.stdout.splitlines()[:-1]] == cases


def test_a_case_can_be_chosen(shardplan):
    done = shardplan("conformance", FOLDER, "uneven_w4_flat")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "matched 1 of 1 cases")
    missing = shardplan("conformance", FOLDER, "uneven_w3")
    assert missing.returncode == 3 and "no recording uneven_w3" in missing.stderr


def _last_bit(tensor):
    flat = tensor.view(-1).view(torch.uint8)
    flat[-1] ^= 1


VALUES = [
    (
        "uneven_w4_flat", "full_optim_state.pt", lambda d: _last_bit(d["state"]["l1.0.weight"]["exp_avg_sq"]),
        "exp_avg_sq of l1.0.weight",
    ),
    ("uneven_w4_flat", "local_optim_state.rank2.pt", lambda d: _last_bit(d["state"][1]["exp_avg"]), "exp_avg of l0"),
    (
        "uneven_w4_orig", "sharded_optim_state.rank1.pt",
        lambda d: _last_bit(d["state"]["inp.weight"]["exp_avg"]["local"][0]["tensor"]), "inp.weight",
    ),
    ("uneven_w2_orig", "full_optim_state.pt", lambda d: d["state"]["l2.1.bias"]["step"].add_(1), "step of l2.1.bias"),
    ("uneven_w2_orig", "full_optim_state.pt", lambda d: d["param_groups"][0].update(lr=0.1), "param_groups"),
    ("uneven_w2_orig", "full_optim_state.pt", lambda d: d["param_groups"][0]["params"].reverse(), "param_groups"),
    ("uneven_w2_orig", "full_optim_state.pt", lambda d: d["state"]["l2.1.bias"].pop("step"), "states of l2.1.bias"),
]


@pytest.mark.parametrize("case, file, change, says", VALUES, ids=[f"{v[1]}-{i}" for i, v in enumerate(VALUES)])
def test_another_value_differs(changed, case, file, change, says):
    assert says in changed(case, file, change)


@pytest.mark.parametrize("field", ["offset_in_shard", "numel_in_shard", "param_start"])
def test_another_slice_differs(changed, field):
    def change(layout):
        parameter = next(p for p in layout["ranks"][3]["units"][1]["params"] if p["in_shard"])
        parameter[field] += 1

    assert "rank 3, unit l0: the slice of" in changed("uneven_w4_orig", "layout.json", change)


def test_the_command_says_where_a_case_differs(tmp_path, shardplan):
    shutil.copytree(FOLDER / "uneven_w4_flat", tmp_path / "case")
    path = tmp_path / "case" / "layout.json"
    layout = json.loads(path.read_text())
    layout["ranks"][1]["units"][0]["shard_start"] += 1
    path.write_text(json.dumps(layout))
    done = shardplan("conformance", tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines() == [
        "case: differs at rank 1, unit (root): shard_start: shardplan 26, FSDP1 27",
        "matched 0 of 1 cases",
    ]


def test_damaged_recordings_are_bad_input_and_the_others_are_compared(tmp_path, shardplan):
    shutil.copytree(FOLDER, tmp_path / "all")
    state = tmp_path / "all" / "uneven_w4_orig" / "local_optim_state.rank1.pt"
    state.write_bytes(state.read_bytes()[:1000])
    (tmp_path / "all" / "uneven_w4_flat" / "layout.json").write_text('{"world_size": 4}')
    done = shardplan("conformance", tmp_path / "all")
    assert done.returncode == 3
    assert str(state) in done.stderr and "uneven_w4_flat/layout.json" in done.stderr
    assert done.stdout.splitlines() == ["uneven_w2_orig: matches (117 values)", "matched 1 of 3 cases"]


def test_a_folder_without_a_case_is_bad_input(tmp_path, shardplan):
    (tmp_path / "case").mkdir()
    assert shardplan("conformance", tmp_path).returncode == 3


@pytest.mark.parametrize("recorded", os.environ.get("SHARDPLAN_RECORDED", "3-orig-7").split())
def test_what_the_installed_fsdp1_makes_at_other_world_sizes_is_reproduced(recorded, tmp_path):
    ranks, variant, width = recorded.split("-")
    (tmp_path / "case").mkdir()
    done = warm.run([RECORDER, tmp_path / "case", ranks, variant, width], timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert compare(tmp_path / "case", build_folder() / "bin" / "shardplan") > 0
