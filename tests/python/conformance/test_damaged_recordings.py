# SPDX-License-Identifier: Apache-2.0
"""`shardplan conformance DIR` on folders and recordings that are missing or damaged: an error that names the place,
never a crash."""

import copy
import json
import random
import re
import shutil

import pytest
from conftest import ROOT

RECORDINGS = ROOT / "tests" / "conformance"
CASES = [("fsdp1", "gptish_ac"), ("fsdp2", "branchy_default_w2")]


@pytest.fixture(params=CASES, ids=lambda case: case[0])
def recording(request):
    policy, name = request.param
    folder = RECORDINGS / policy
    return json.loads((folder / f"{name}.json").read_text()), folder / f"{name}.log"


def write(folder, name, document, log):
    (folder / f"{name}.json").write_text(document if isinstance(document, str) else json.dumps(document))
    shutil.copy(log, folder / f"{name}.log")


def places(value, path=()):
    """Every value below `value`, by its path."""
    yield path
    if isinstance(value, dict):
        for key, member in value.items():
            yield from places(member, (*path, key))
    elif isinstance(value, list):
        for index, element in enumerate(value):
            yield from places(element, (*path, index))


def changed(document, path, change):
    """The document with `change(holder, key)` done at `path`."""
    result = copy.deepcopy(document)
    holder = result
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    return result


def pointer(path):
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in path)


def test_a_missing_folder_and_one_without_a_case_are_named(shardplan, tmp_path):
    for folder, text in [(tmp_path / "fsdp3", "cannot read the folder"), (tmp_path, "has no recording")]:
        result = shardplan("conformance", folder)
        assert result.returncode == 3, result.stdout + result.stderr
        assert str(folder) in result.stderr and text in result.stderr


def test_a_missing_case_is_named(shardplan):
    result = shardplan("conformance", RECORDINGS / "fsdp2", "branchy_default_w2", "no_such_case")
    assert result.returncode == 3
    assert "no_such_case.log" in result.stderr and "matches" not in result.stdout


def test_only_the_cases_given_are_compared(shardplan):
    result = shardplan("conformance", RECORDINGS / "fsdp2", "branchy_default_w2")
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("matched 1 of 1 cases\n")


def test_the_place_of_the_damage_is_named_and_the_other_cases_are_compared(shardplan, recording, tmp_path):
    document, log = recording
    write(tmp_path, "whole", document, log)
    world = changed(document, ("world_size",), lambda holder, key: holder.update({key: "two"}))
    write(tmp_path, "typed", world, log)
    write(tmp_path, "torn", json.dumps(document)[:2000], log)
    missing = changed(document, ("mesh",), lambda holder, key: holder.pop(key))
    write(tmp_path, "missing", missing, log)
    (tmp_path / "worded.log").write_text(log.read_text() + "step=0 forward\n")
    (tmp_path / "worded.json").write_text(json.dumps(document))
    result = shardplan("conformance", tmp_path)
    assert result.returncode == 3
    assert f"{tmp_path}/typed.json: /world_size: " in result.stderr and "expected an integer" in result.stderr
    assert f"{tmp_path}/torn.json: " in result.stderr
    assert f"{tmp_path}/missing.json: " in result.stderr and 'a member "mesh"' in result.stderr
    last = log.read_text().count("\n") + 1
    assert f"{tmp_path}/worded.log: line {last}: " in result.stderr
    assert "whole: matches" in result.stdout and "matched 1 of 5 cases" in result.stdout


def test_damage_anywhere_is_no_crash(shardplan, recording, tmp_path):
    """Members taken away and values of another type or out of range, at places drawn at random."""
    document, log = recording
    changes = [
        lambda holder, key: holder.pop(key),
        lambda holder, key: holder.__setitem__(key, None),
        lambda holder, key: holder.__setitem__(key, {"a": 1}),
        lambda holder, key: holder.__setitem__(key, []),
        lambda holder, key: holder.__setitem__(key, -7),
        lambda holder, key: holder.__setitem__(key, 1 << 60),
        lambda holder, key: holder.__setitem__(key, "no such name"),
    ]
    everywhere = [path for path in places(document) if path]
    draw = random.Random(13)
    damaged = {}
    for number in range(400):
        path, change = draw.choice(everywhere), draw.randrange(len(changes))
        name = f"case{number}"
        damaged[name] = (path, change)
        write(tmp_path, name, changed(document, path, changes[change]), log)
    result = shardplan("conformance", tmp_path, timeout=300)
    assert result.returncode in (1, 3), (result.returncode, result.stderr[-2000:])
    refused = dict(re.findall(rf"{re.escape(str(tmp_path))}/(case\d+)\.json: (.*)", result.stderr))
    compared = set(re.findall(r"^(case\d+): ", result.stdout, re.MULTILINE))
    assert refused.keys() | compared == damaged.keys()
    assert len(refused) > 150
    for name, message in refused.items():
        path, _ = damaged[name]
        # The place, what holds it, or what refers to it.
        assert message.startswith("/") or "the recording" in message, (name, path, message)
