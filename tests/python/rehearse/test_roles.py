# SPDX-License-Identifier: Apache-2.0
"""Roles of processes, and the begin and end of steps and phases: without torch."""

import subprocess
import sys
import types

import pytest
from conftest import ROOT, build_folder

SITE = ROOT / "tools" / "python" / "shardplan" / "rehearse" / "site"
sys.path[:0] = [str(ROOT / "tools" / "python"), str(SITE)]
from shardplan.rehearse import routing
from shardplan.rehearse.device import device_of
from shardplan_rehearsal import phases, roles, run


@pytest.mark.parametrize(
    ("words", "launcher"),
    [
        (["python", "/venv/bin/torchrun", "train.py"], True),
        (["python", "-m", "torch.distributed.run", "train.py"], True),
        (["python", "-u", "-X", "dev", "-m", "torch.distributed.launch"], True),
        (["python", "/venv/bin/accelerate", "launch", "train.py"], True),
        (["python", "/venv/bin/deepspeed", "train.py"], True),
        (["python", "-u", "train.py", "-m", "torch.distributed.run"], False),
        (["python", "-m", "torchtitan.train"], False),
        (["python", "-c", "pass"], False),
        (["python"], False),
    ],
)
def test_launchers_are_known_by_their_words(words, launcher):
    assert roles._is_launcher(words) == launcher


def recorder_of(steps, monkeypatch):
    """A recorder that reads no device, and the list that it ends in."""
    monkeypatch.setattr(run, "_run", types.SimpleNamespace(steps=steps))
    nothing = types.SimpleNamespace(_cuda_memoryStats=None, _cuda_resetPeakMemoryStats=None)
    torch = types.SimpleNamespace(
        _C=nothing,
        cuda=types.SimpleNamespace(is_initialized=lambda: False),
        distributed=types.SimpleNamespace(is_available=lambda: False),
    )
    recorder = phases.Recorder(torch)
    done = []
    recorder.when_done = lambda: done.append(recorder.steps_done)
    return recorder, done


def play(recorder, events):
    """f: a module runs, B: a backward, O: an optimizer steps, (O): one inside a backward, [B]: a backward inside an
    optimizer's step."""
    optimizer = types.SimpleNamespace(param_groups=[], state={})
    actions = {
        "f": [recorder.module_runs],
        "B": [recorder.backward_begins, recorder.backward_ends],
        "O": [lambda: recorder.optimizer_begins(optimizer), lambda: recorder.optimizer_ends(optimizer)],
        "(": [recorder.backward_begins],
        ")": [recorder.backward_ends],
        "[": [lambda: recorder.optimizer_begins(optimizer)],
        "]": [lambda: recorder.optimizer_ends(optimizer)],
    }
    for event in events:
        for action in actions[event]:
            action()


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (
            "fBO fBO f",
            [
                (0, "setup"),
                (1, "forward"),
                (1, "backward"),
                (1, "optimizer"),
                (2, "forward"),
                (2, "backward"),
                (2, "optimizer"),
                (3, "forward"),
            ],
        ),
        (
            "fBfBO",
            [
                (0, "setup"),
                (1, "forward"),
                (1, "backward"),
                (1, "forward"),
                (1, "backward"),
                (1, "optimizer"),
                (1, "optimizer"),
            ],
        ),
        ("fBOO f", [(0, "setup"), (1, "forward"), (1, "backward"), (1, "optimizer"), (1, "optimizer"), (2, "forward")]),
        ("f(O) f", [(0, "setup"), (1, "forward"), (1, "backward"), (2, "forward")]),
        ("f[fB] f", [(0, "setup"), (1, "forward"), (1, "optimizer"), (2, "forward")]),
        ("BO", [(0, "setup"), (1, "forward"), (1, "backward"), (1, "optimizer"), (1, "optimizer")]),
        ("", [(0, "setup")]),
    ],
)
def test_stretches_of_a_run(events, expected, monkeypatch):
    recorder, _ = recorder_of(0, monkeypatch)
    play(recorder, events.replace(" ", ""))
    recorder.end()
    assert [(stretch.step, stretch.phase) for stretch in recorder.stretches] == expected


def test_the_run_ends_when_the_step_behind_the_last_begins(monkeypatch):
    recorder, done = recorder_of(2, monkeypatch)
    play(recorder, "fBOfBO")
    assert done == []
    recorder.module_runs()
    assert done == [2]


def test_addresses_of_a_step_below_the_peak_are_forgotten(monkeypatch):
    recorder, _ = recorder_of(0, monkeypatch)
    kept = []
    for allocated in (5, 7, 7, 6, 8):
        play(recorder, "fBO")
        recorder.stretches[-1].allocated_bytes = allocated
        recorder.addresses.append(phases.Known(0, allocated, "param_sharded", ""))
        recorder.module_runs()
        kept.append(len(recorder.addresses))
    assert kept == [1, 2, 2, 2, 3]


def test_a_process_without_torch_runs_as_ever_and_the_next_sitecustomize_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('behind')")
    (tmp_path / "torch.py").write_text("__version__ = 'mine'")
    (tmp_path / "colorsys.py").write_text("found = True")
    environment = {"PYTHONPATH": f"{SITE}:{tmp_path}", "SHARDPLAN_REHEARSE": "{}", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", "import sys, colorsys; print(colorsys.found, 'json' in sys.modules)"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("behind\nTrue False\n", "")


def test_nccl_takes_what_shardplan_memory_says(shardplan, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDPLAN_PROGRAMS", str(build_folder() / "bin"))
    if not (build_folder() / "bin" / "shardplan").exists():
        pytest.skip("no command")
    shardplan(
        "plan", ROOT / "examples" / "three_layers" / "trace.json", "--ranks", 8, "--unit", "layers.*", "-q", "-o",
        tmp_path / "plan.json",
    )
    assert f"{device_of('h100_sxm', None, None).nccl_bytes}" in shardplan(
        "memory", tmp_path / "plan.json", "-q"
    ).stdout.replace(",", "")


@pytest.mark.parametrize(
    ("cluster", "name", "capability", "multiprocessors"),
    [
        ("h100_sxm", "NVIDIA H100 SXM 80GB", "9.0", 132),
        ("a100_80_8", "NVIDIA A100 SXM 80GB", "8.0", 108),
        ("b200_8", "NVIDIA B200 SXM 180GB", "10.0", 148),
        ("gb200_nvl72_72", "NVIDIA GB200 186GB", "10.0", 148),
    ],
)
def test_a_clusters_device_is_of_its_kind(monkeypatch, cluster, name, capability, multiprocessors):
    monkeypatch.setenv("SHARDPLAN_PROGRAMS", str(build_folder() / "bin"))
    device = device_of(cluster, None, None)
    assert (device.cuda_name, device.capability, device.multiprocessors) == (name, capability, multiprocessors)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4,2,x", ":1: found x, expected an expert's share"),
        ("1\n-1", ":2: found -1"),
        ("0,0", "no expert has a share (found only zeros"),
        ("", "found no number"),
        ("nan", "found nan"),
    ],
)
def test_a_routing_without_shares_is_refused_with_its_place(tmp_path, text, message):
    (tmp_path / "routing.csv").write_text(text)
    with pytest.raises(routing.BadRouting) as error:
        routing.shares_of(str(tmp_path / "routing.csv"))
    assert message in str(error.value) and "routing.csv" in str(error.value)


def test_a_routing_is_numbers_in_any_layout(tmp_path):
    (tmp_path / "routing.csv").write_text("4, 2\n1;1\n\n0.5\n")
    assert routing.shares_of(str(tmp_path / "routing.csv")) == (4, 2, 1, 1, 0.5)
