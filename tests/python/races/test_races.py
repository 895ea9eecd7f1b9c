# SPDX-License-Identifier: Apache-2.0
"""`shardplan rehearse --races`: each wrong program of examples/races is told by its lines, each mended one is clean."""

import gzip
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from conftest import ROOT, build_folder

EXAMPLES = ROOT / "examples" / "races"
# The first race in words, the lines of its first and its second access, and who has to wait.
WRONG = {
    "unordered_streams": ("mul reads what aten::fill_ writes", "fill_(step)", "weights * 2", "stream 1 has to wait"),
    "result_not_awaited": ("sum reads what aten::pow writes", "square()", "norms.sum()", "stream 0 has to wait"),
    "freed_in_use": ("was freed while aten::add_ may still read it", "add_(gradient)", "scratch =", "record_stream"),
    "pinned_overwritten": ("the host (aten::fill_) writes", "non_blocking", "staging.fill_", "the host has to wait"),
    "offload_read_early": ("the host (aten::sum) reads", "non_blocking", "on_host.sum()", "the host has to wait"),
    "staged_in_a_thread": ("and nothing orders them", "weights.mul_", "staged.copy_", "has to wait for stream"),
    "collective_not_awaited": (
        "clamp_ writes what all_reduce writes", "dist.all_reduce", "gradient.clamp_", "stream 0 has",
    ),
    "buffer_gathered_into_twice": (
        "all_gather writes what aten::mul reads", "state * pool", "all_gather_into_tensor", "stream 1 has",
    ),
}  # fmt: skip
NEEDS_RANKS = {"collective_not_awaited", "buffer_gathered_into_twice"}


def environment():
    library = pathlib.Path(os.environ.get("SHARDPLAN_DEVICE_LIBRARY_FOLDER", build_folder() / "device"))
    if not (library / "libshardplan_device.so").exists():
        pytest.skip(f"no libshardplan_device.so in {library}: torch has no CUDA, or the build has sanitizers")
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "tools" / "python"),
        "SHARDPLAN_PROGRAMS": str(build_folder() / "bin"),
        "SHARDPLAN_DEVICE_LIBRARY_FOLDER": str(library),
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
    }


def rehearse(script, *flags, mended=False, ranks=8):
    words = ["torchrun", "--nproc_per_node", str(ranks)] if script.stem in NEEDS_RANKS else ["python"]
    of_job = ["--gpus", str(ranks)] if script.stem in NEEDS_RANKS else []
    return subprocess.run(
        [
            sys.executable, "-m", "shardplan.rehearse", "-q", *of_job, *flags, "--", *words, str(script),
            *(["mended"] if mended else []),
        ],
        capture_output=True, text=True, timeout=300, env=environment(), check=False,
    )  # fmt: skip


def line_of(script, words):
    """The number of the line that has the words."""
    lines = script.read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if words in line]
    return number


def test_every_example_is_tried():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(WRONG)


@pytest.mark.parametrize("name", WRONG)
def test_a_race_is_told_by_both_lines_and_the_edge_that_is_missing(name):
    script = EXAMPLES / f"{name}.py"
    head, first, second, missing = WRONG[name]
    done = rehearse(script, "--races")
    assert done.returncode == 1, done.stdout + done.stderr
    race = re.search(r"^race 1.*?(?=^race 2|^\d+ race|\Z)", done.stdout, re.MULTILINE | re.DOTALL).group()
    assert head in race, race
    places = re.findall(r"^  (?:first|second) .*\n +at (.*)$", race, re.MULTILINE)
    if name == "staged_in_a_thread" and str(line_of(script, first)) not in places[0]:
        places.reverse()  # two threads issue: either may come first
    for place, words in zip(places, (first, second), strict=True):
        assert f"{name}.py:{line_of(script, words)} " in place, race
    assert missing in race.splitlines()[-1], race


@pytest.mark.parametrize("name", WRONG)
def test_the_mended_program_is_clean(name):
    done = rehearse(EXAMPLES / f"{name}.py", "--races", mended=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^no races \(\d+ accesses to memory\)$", done.stdout, re.MULTILINE), done.stdout


# Output of the program in the order of its host. Two threads of staged_in_a_thread may issue in any order.
NUMBERS = {
    "unordered_streams": "total 4194304.0",
    "freed_in_use": "total 3145728.0",
    "pinned_overwritten": "total 196608",
    "collective_not_awaited": "gradient 1048576.0",
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_a_race_is_shown_as_a_wrong_number(name):
    done = rehearse(EXAMPLES / f"{name}.py", "--races", "--show", "--no-history", ranks=2)
    assert done.returncode == 1, done.stdout + done.stderr
    rows = re.findall(r"^  (host|race)  (.*)$", done.stdout, re.MULTILINE)
    of_the_host = [line for order, line in rows if order == "host"]
    assert of_the_host and set(of_the_host) == {NUMBERS[name]}, done.stdout
    wrong = [line for order, line in rows if order == "race"]
    assert len(wrong) == len(of_the_host) and NUMBERS[name] not in wrong, done.stdout


def test_only_a_race_that_is_there_is_shown():
    script = EXAMPLES / "freed_in_use.py"
    done = rehearse(script, "--show")
    assert done.returncode == 2 and "--show shows a race that is proved: give --races" in done.stderr
    done = rehearse(script, "--races", "--show", "2", "--no-history")
    assert done.returncode == 2 and "--show 2: of 1 races the last is 1" in done.stderr
    done = rehearse(script, "--races", "--show", "--no-history", mended=True)
    assert done.returncode == 0 and "in its order" not in done.stdout, done.stdout + done.stderr


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    path = tmp_path_factory.mktemp("recording") / "recording.json.gz"
    done = rehearse(EXAMPLES / "freed_in_use.py", "--record", path)
    assert done.returncode == 0, done.stderr
    return path


def validate(path):
    return subprocess.run(
        [build_folder() / "bin" / "shardplan", "validate", path], capture_output=True, text=True, check=False
    )


def test_a_recording_is_proved_later(recording):
    done = validate(recording)
    assert done.returncode == 1 and "recording of python freed_in_use.py" in done.stdout
    assert "1 race (" in done.stdout


def communicate(document, ranks):
    document.update(world_size=2)
    document["communicators"].append({"size": 2, "rank": 0, "ranks": ranks})


def message_to_nobody(document):
    document["communicators"].append({"size": 2, "rank": 0})
    last = len(document["communicators"]) - 1
    document["events"].append(["collective", 0, -1, 0, "send", last, "uint8", 1, [], [], 5, -1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["events"].append(["wait", 0, -1, 0, 9999]), "an event that nobody recorded (found 9999"),
        (lambda d: d.update(schema="shardplan.recording/2"), "unknown kind or version of document"),
        (lambda d: d["events"].append(["memset", 0, -1, 99, []]), "not a stream of this document"),
        (lambda d: d["events"].append(["dance", 0]), "unknown kind"),
        (message_to_nobody, "a receive say with whom, and nothing else does (found 5, expected 0 to 1)"),
        (lambda d: d["places"].append({"frames": [], "forward": len(d["places"])}), "a forward that comes later"),
        (lambda d: d["events"].append(["phase", "forwrd", 1]), "unknown phase (found forwrd, expected setup, forward"),
        (lambda d: communicate(d, [0, 0]), "a rank that the communicator has twice (found 0, expected each once)"),
        (lambda d: communicate(d, [0, 9]), "no rank of the job (found 9, expected 0 to 1)"),
        (lambda d: communicate(d, [1, 0]), "not the recording's rank, which has this place (found 1, expected 0)"),
    ],
    ids=[
        "an event that nobody recorded", "another version", "no such stream", "no such kind", "no such peer",
        "a later forward", "no such phase", "a rank twice", "a rank of no job", "another rank's place",
    ],
)  # fmt: skip
def test_a_wrong_recording_is_told_by_its_place(recording, tmp_path, change, said):
    document = json.loads(gzip.decompress(recording.read_bytes()))
    change(document)
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(document))
    done = validate(wrong)
    assert done.returncode == 3 and said in done.stderr and ": /" in done.stderr, done.stderr


def test_a_recording_that_is_cut_off_is_told(recording, tmp_path):
    whole = gzip.decompress(recording.read_bytes())
    (tmp_path / "cut.json").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "cut.json.gz").write_bytes(recording.read_bytes()[:-20])
    for name in ("cut.json", "cut.json.gz"):
        done = validate(tmp_path / name)
        assert done.returncode == 3 and re.search("truncated|cut off|damaged", done.stderr), done.stderr


def test_a_script_that_issues_nothing_has_no_recording(tmp_path):
    script = tmp_path / "nothing.py"
    script.write_text("import torch\n")
    done = rehearse(script, "--record", tmp_path / "recording.json")
    assert done.returncode == 3 and "no recording" in done.stderr, done.stderr
    assert not (tmp_path / "recording.json").exists()
