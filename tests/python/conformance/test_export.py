# SPDX-License-Identifier: Apache-2.0
"""`shardplan export --fsdp2`: what the installed FSDP2 issues under the written file is the plan, event for event."""

import functools
import json
import subprocess

import pytest
from conftest import build_folder

from shardplan.tracer import session  # noqa: F401  before the first backward of the process
import export_cases
from shardplan_conformance import recording
from shardplan_conformance.random_cases import random_case
from shardplan_conformance.ranks import Ranks, RecordingFailed

RANDOM = range(700, 724)


@pytest.fixture(scope="module")
def fake():
    with Ranks(1, fake=True) as ranks:
        yield ranks


def _exportable(step: list[dict]) -> list[dict]:
    """The step without calls that are the loop's own code: states of checkpoints."""
    return [call for call in step if call.get("method") not in ("state_dict", "load_state_dict")]


def random_exported(seed: int, apply: str = ""):
    case = random_case("fsdp2", seed)
    case.apply = apply
    case.strategy["program"] = [_exportable(case.program()[-1])]
    case.strategy["pin_memory"] = False  # there is nothing to pin memory for
    return case


def traced(fake, make, folder):
    """NAME.trace.json and NAME.strategy.json of the case; its name."""
    recording.write(functools.partial(make, ""), functools.partial(fake.record, functools.partial(make, "")), folder)
    return make("").name


def differs(fake, make, folder, name, script) -> str:
    """The words of `shardplan-conformance` against the events of FSDP2 under the script; "": it is the plan."""
    recording.write(
        functools.partial(make, str(script)),
        functools.partial(fake.record, functools.partial(make, str(script))),
        folder,
    )
    done = subprocess.run(
        [build_folder() / "bin" / "shardplan-conformance", folder, name], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout


def exported(shardplan, folder, name, ranks, *flags):
    plan, script = folder / "plan.json", folder / "apply_plan.py"
    made = shardplan(
        "plan", folder / f"{name}.trace.json", "--strategy", folder / f"{name}.strategy.json", "--cluster", "h100",
        "--ranks", ranks, "-q", "-o", plan, *flags,
    )
    if "does not verify" in made.stderr:
        pytest.skip("a training loop that trains nothing right has no plan")
    assert made.returncode == 0, made.stderr
    done = shardplan("export", plan, "--fsdp2", "--trace", folder / f"{name}.trace.json", "-o", script)
    return done, script


@pytest.mark.parametrize("name", export_cases.STRATEGIES)
def test_the_file_issues_the_plan(shardplan, fake, name, tmp_path):
    make = functools.partial(export_cases.exported_case, name)
    traced(fake, make, tmp_path)
    done, script = exported(shardplan, tmp_path, name, make().ranks)
    assert done.returncode == 0, done.stderr
    assert "These calls issue the plan's schedule, instruction for instruction." in done.stdout
    assert "These calls issue the plan's schedule" in script.read_text().split('"""')[1]
    assert differs(fake, make, tmp_path, name, script) == ""


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("keeps", "reshard_after_forward=False", "reshard_after_forward=True"),
        ("prefetches", "units[i + 1 : i + 3]", "units[i + 1 : i + 2]"),
        ("accumulates", "if forward == 1:", "if forward == 2:"),
        ("precision", "param_dtype=torch.bfloat16, ", ""),
        ("hsdp", "mesh=mesh", "mesh=mesh[\"shard\"]"),
        ("groups", "for name in [\"layers.0\", \"layers.1\"]]", "for name in [\"layers.0\"]]"),
    ],
)
def test_a_changed_file_does_not(shardplan, fake, name, old, new, tmp_path):
    make = functools.partial(export_cases.exported_case, name)
    traced(fake, make, tmp_path)
    _, script = exported(shardplan, tmp_path, name, make().ranks)
    text = script.read_text()
    assert text.count(old) >= 1, text
    script.write_text(text.replace(old, new))
    assert "differs at event" in differs(fake, make, tmp_path, name, script)


@pytest.mark.parametrize("seed", RANDOM)
def test_random_strategies(shardplan, fake, seed, tmp_path):
    """Random models and knobs. Knobs that the file is not written for are refused with their places."""
    make = functools.partial(random_exported, seed)
    try:
        name = traced(fake, make, tmp_path)
    except RecordingFailed as error:
        pytest.skip(f"PyTorch does not run it: {error}")
    done, script = exported(shardplan, tmp_path, name, make().ranks)
    if done.returncode == 3:
        assert "export does not write" in done.stderr and "/strategy/" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert differs(fake, make, tmp_path, name, script) == "", f"seed {seed}"


def test_an_optimised_plan_that_may_decide_what_fsdp2_can_be_told(shardplan, fake, tmp_path):
    make = functools.partial(export_cases.exported_case, "default")
    traced(fake, make, tmp_path)
    plan, strategy, script = tmp_path / "plan.json", tmp_path / "best.json", tmp_path / "apply_plan.py"
    trace = tmp_path / "default.trace.json"
    result = shardplan(
        "optimize", trace, "--cluster", "h100", "--ranks", 2, "--memory-budget", "device", "--allow", "checkpoint",
        "--accumulate", 2, "--expressible", "fsdp2", "--write-strategy", strategy, "-q", "-o", plan,
    )
    assert result.returncode == 0, result.stderr
    done = shardplan("export", plan, "--fsdp2", "--trace", trace, "-o", script)
    assert done.returncode == 0 and "instruction for instruction" in done.stdout, done.stdout + done.stderr
    found = json.loads(strategy.read_text())
    best = functools.partial(export_cases.exported_case, "default", strategy=found)
    assert differs(fake, best, tmp_path, "default", script) == ""
