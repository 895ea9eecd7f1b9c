# SPDX-License-Identifier: Apache-2.0
"""The installed PyTorch against the plan: the recorder against recordings made independently, random cases, the
command."""

import functools
import os
import pathlib
import re
import subprocess

import pytest
import live_cases
import live_gradients
import reference_cases
import reference_models
import reference_recorder
import torch
from conftest import ROOT, build_folder, installed_pytorch

from shardplan.tracer import session  # noqa: F401  before the first backward of the process
from shardplan_conformance import Case, Forward, cli, recording
from shardplan_conformance.case import CaseError, planner_strategy, traced_program
from shardplan_conformance.random_cases import random_case
from shardplan_conformance.ranks import Ranks, RecordingFailed

KEYS = {
    "fsdp2": "step phase op unit bytes dtype group ranks to noop via kind".split(),
    "fsdp1": "step phase op unit bytes dtype group ranks free freed_bytes prefetch".split(),
}
RECORDED = [
    ("fsdp2", "branchy_default_w2"),
    ("fsdp2", "frozen_prefix_w2"),
    ("fsdp2", "gptish_accum_notlast_w2"),
    ("fsdp2", "gptish_bf16_w2"),
    ("fsdp2", "gptish_hsdp_accum_noallreduce_2x2"),
    ("fsdp2", "gptish_multifwd_w2"),
    ("fsdp2", "gptish_raf_int2_w4"),
    ("fsdp2", "reused_fwdprefetch1_w2"),
    ("fsdp1", "gptish_fprefetch"),
    ("fsdp1", "gptish_hsdp"),
    ("fsdp1", "gptish_mp_bf16"),
    ("fsdp1", "gptish_nosync_zero2"),
    ("fsdp1", "gptish_noshard"),
    ("fsdp1", "gptish_offload"),
    ("fsdp1", "mlp3_default"),
    ("fsdp1", "uneven_w3_orig"),
]
RANDOM = range(400, 404)  # seeds for each policy; more: tools/nightly --only live


@pytest.fixture(scope="module")
def fake():
    with Ranks(1, fake=True) as ranks:
        yield ranks


def compared(lines: list[str], policy: str) -> list[str]:
    """The lines that are compared, with the keys that are."""
    result = []
    for line in lines:
        if line.startswith("#"):
            continue
        words = dict(word.split("=", 1) for word in line.split())
        aside = words["op"] in ("stream_wait", "root_pre_forward") or words["op"].startswith("use_")
        if policy == "fsdp1" and (aside or "skipped" in words or "handle" in words):
            continue
        result.append(" ".join(f"{key}={words[key]}" for key in KEYS[policy] if key in words))
    return result


def reference_case(policy: str, name: str) -> Case:
    return getattr(reference_models, f"{policy}_case")(name)


def recordings(policy: str) -> pathlib.Path:
    """The recordings of the installed torch, if it has its own."""
    folder = ROOT / "tests" / "conformance"
    own = folder / f"{policy}_{installed_pytorch().replace('.', '')}"
    return own if own.is_dir() else folder / policy


def order_of(case: Case) -> list[str]:
    return [fqn for fqn, _ in case.model().named_modules()]


@pytest.mark.parametrize("policy, name", RECORDED)
def test_recorder_writes_what_was_recorded_before(fake, policy, name):
    lines = fake.record(functools.partial(reference_case, policy, name), order_of(reference_case(policy, name)))
    wanted = (recordings(policy) / f"{name}.log").read_text().splitlines()
    assert compared(lines, policy) == compared(wanted, policy)


def own_case(name: str) -> Case:
    return next(case for case in reference_cases.cases() if case.name == name)


def _of_any_torch(text: str) -> str:
    return re.sub(r"\b2\.\d+\.\d+\+cu\d+", "TORCH", text)


@pytest.mark.parametrize(
    "name", ["t5_fsdp1", "encdec_reused_fsdp2", "ckpt_call_around_block_fsdp2", "ckpt_call_around_stage_nostop_fsdp2"]
)
def test_reference_recorder_writes_what_it_wrote_before(fake, name, tmp_path):
    make = functools.partial(own_case, name)
    reference_recorder.write(make, fake.record(make, order_of(make())), tmp_path)
    for suffix in ("json", "log"):
        written, wanted = (folder / f"{name}.{suffix}" for folder in (tmp_path, ROOT / "tests" / "conformance" / "own"))
        assert _of_any_torch(written.read_text()) == _of_any_torch(wanted.read_text())


def test_gloo_ranks_issue_what_the_fake_one_issues(fake):
    with Ranks(4) as gloo:
        for policy, seed in (("fsdp2", 1000), ("fsdp2", 1003), ("fsdp1", 7)):
            make = functools.partial(random_case, policy, seed)
            order = order_of(make())
            assert gloo.record(make, order) == fake.record(make, order), f"{policy} seed {seed}"


def compare(folder, *names: str) -> subprocess.CompletedProcess:
    program = build_folder() / "bin" / "shardplan-conformance"
    return subprocess.run([str(program), str(folder), *names], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("policy", ["fsdp2", "fsdp1"])
def test_random_cases_are_planned_as_the_installed_pytorch_runs_them(fake, policy, tmp_path):
    given = os.environ.get("SHARDPLAN_SEED")
    seeds = [int(given)] if given else RANDOM
    recorded = 0
    for seed in seeds:
        make = functools.partial(random_case, policy, seed)
        try:
            recording.write(make, functools.partial(fake.record, make), tmp_path)
        except RecordingFailed as error:
            print(f"seed {seed}: PyTorch does not run it: {error}")
            continue
        recorded += 1
        result = compare(tmp_path, make().name)
        assert result.returncode == 0, f"seed {seed}\n{result.stdout}"
    assert recorded >= len(seeds) // 2


def assert_planned_as_run(fake, make, tmp_path) -> None:
    recording.write(make, functools.partial(fake.record, make), tmp_path)
    result = compare(tmp_path, make().name)
    assert result.returncode == 0, result.stdout


def knob_case(index: int) -> Case:
    return live_cases.cases()[index]


@pytest.mark.parametrize("index", range(len(live_cases.cases())), ids=lambda index: live_cases.cases()[index].name)
def test_knobs_are_planned_as_the_installed_pytorch_runs_them(fake, index, tmp_path):
    assert_planned_as_run(fake, functools.partial(knob_case, index), tmp_path)


def gradient_case(index: int) -> Case:
    return live_gradients.cases()[index]


@pytest.mark.skipif(installed_pytorch() != "2.15", reason="of FSDP2 as it is since 2.15")
@pytest.mark.parametrize(
    "index", range(len(live_gradients.cases())), ids=lambda index: live_gradients.cases()[index].name
)
def test_gradients_are_planned_as_the_installed_pytorch_reduces_them(fake, index, tmp_path):
    assert_planned_as_run(fake, functools.partial(gradient_case, index), tmp_path)


# ---- cases ----


def small_case(**strategy) -> Case:
    model = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))  # noqa: E731
    base = {"policy": "fsdp2", "units": [{"modules": ["0"]}, {"modules": [""]}]}
    x = torch.zeros(2, 4)
    return Case(model, [Forward((x,)), Forward((x,), grad=False)], {**base, **strategy}, name="small")


def test_forwards_are_traced_together_with_their_backward():
    forward = lambda m, i=0: {"call": "forward", "microbatch": m, "trace": i}  # noqa: E731
    step = [forward(5, 1), forward(1), forward(0), {"call": "backward", "microbatches": [0, 1]}]
    case = small_case(program=[step, [forward(0), {"call": "backward"}]])
    traced = traced_program(case)
    assert traced.groups == [((0, 0), True), ((0,), True), ((1,), False)]
    first, second = planner_strategy(case)["program"]
    assert [call["trace"] for call in first] == [3, 0, 1, 0]
    assert first[3]["microbatches"] == [1, 0]  # in the order of their forwards
    assert [call["trace"] for call in second] == [2, 1]


def test_a_backward_without_its_forward_is_an_error():
    with pytest.raises(CaseError, match="/program/0/1: no forward of micro-batch 1"):
        traced_program(small_case(program=[[{"call": "forward"}, {"call": "backward", "microbatches": [1]}]]))
    with pytest.raises(CaseError, match="without gradients"):
        traced_program(small_case(program=[[{"call": "forward", "trace": 1}, {"call": "backward"}]]))


# ---- the command ----


@pytest.fixture(scope="module")
def case_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cases")
    (folder / "own_cases.py").write_text(
        "import torch\n"
        "from shardplan_conformance import Case, Forward\n"
        "def model():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))\n"
        "def one(**more):\n"
        "    strategy = {'policy': 'fsdp2', 'units': [{'modules': ['0']}, {'modules': ['']}], **more}\n"
        "    return Case(model, [Forward((torch.zeros(2, 4),))], strategy, ranks=2, name='one')\n"
        "def nowhere():\n"
        "    return one(units=[{'modules': ['layers.*']}])\n"
        "def number():\n"
        "    return 3\n"
    )
    return folder


def test_live_case_matches_on_gloo_ranks_and_can_be_compared_again(shardplan, case_folder, tmp_path):
    result = shardplan("conformance", "--live", "own_cases:one", "--keep", tmp_path, cwd=case_folder, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "one: matches" in result.stdout and "matched 1 of 1 cases" in result.stdout
    assert shardplan("conformance", tmp_path).returncode == 0

    strategy = tmp_path / "one.strategy.json"
    strategy.write_text(strategy.read_text().replace('"modules": [', '"reshard_after_forward": false, "modules": [', 1))
    changed = shardplan("conformance", tmp_path)
    assert changed.returncode == 1
    assert "one: differs at event" in changed.stdout and "op=reshard" in changed.stdout


@pytest.mark.parametrize(
    "arguments, code, text",
    [
        (["--live", "own_cases:nowhere"], 3, 'no module is named "layers.*"'),
        (["--live", "own_cases:one", "--random", "1"], 2, "one of DIR, --live and --random"),
        ([], 2, "one of DIR, --live and --random"),
        (["--help"], 0, "MODULE:FUNCTION"),
    ],
)
def test_errors_of_the_command(shardplan, case_folder, arguments, code, text):
    result = shardplan("conformance", *arguments, cwd=case_folder, timeout=600)
    assert result.returncode == code, result.stdout + result.stderr
    assert text in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("source", "text"),
    [("own_cases:number", "expected a shardplan_conformance.Case"), ("no_such_module:case", "no_such_module")],
)
def test_what_gives_no_case_is_bad_input(case_folder, source, text, capsys, monkeypatch):
    monkeypatch.chdir(case_folder)
    monkeypatch.syspath_prepend(case_folder)
    assert cli.main(["--live", source]) == 3
    assert text in capsys.readouterr().err
