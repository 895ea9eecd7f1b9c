# SPDX-License-Identifier: Apache-2.0
"""Does it fit? `memory`, `simulate`, `evaluate` and `optimize` say one thing, of a plan and of the trace that it was
made from."""

import json
import subprocess

import pytest
from conftest import ROOT, build_folder

TRACE = ROOT / "examples" / "three_layers" / "trace.json"
JOB = ["--cluster", "h100", "--ranks", "4", "--unit", "layers.*"]
BUDGETS = [f"{mib}MiB" for mib in range(560, 900, 12)]
# Parameters in no unit count, too.
SETTINGS = {"all in units": [], "some in none": ["--ignore", "layers.1.weight"]}


def answers(shardplan, plan, flags, budget):
    asked = ["--memory-budget", budget]
    evaluated = subprocess.run(
        [build_folder() / "bin" / "shardplan", "evaluate"],
        input=json.dumps([str(TRACE), *JOB, *flags, *asked]) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    yield "evaluate", json.loads(evaluated.stdout)["fits"]
    for name, command in {
        "memory of the plan": ["memory", plan],
        "memory of the trace": ["memory", TRACE, *JOB, *flags],
        "simulate": ["simulate", plan, "-q"],
    }.items():
        result = shardplan(*command, *asked)
        assert result.returncode in (0, 1), result.stderr
        yield name, result.returncode == 0


@pytest.mark.parametrize("flags", SETTINGS.values(), ids=SETTINGS)
def test_commands_agree(shardplan, tmp_path, flags):
    plan = tmp_path / "plan.json"
    assert shardplan("plan", TRACE, *JOB, *flags, "-q", "-o", plan).returncode == 0
    said = {budget: dict(answers(shardplan, plan, flags, budget)) for budget in BUDGETS}
    for budget, by_command in said.items():
        assert len(set(by_command.values())) == 1, f"{budget}: {by_command}"
    fits = [by_command["simulate"] for by_command in said.values()]
    assert True in fits and False in fits and fits == sorted(fits), "the border is among the budgets"


def test_what_is_in_no_unit_is_needed(shardplan, tmp_path):
    """A plan has the bytes of such parameters, of their gradients and of AdamW's states; every rank has all of them."""
    plan, report = tmp_path / "plan.json", tmp_path / "report.json"
    assert shardplan("plan", TRACE, *JOB, *SETTINGS["some in none"], "-q", "-o", plan).returncode == 0
    unmanaged = json.loads(plan.read_text())["unmanaged"]
    assert (
        unmanaged["parameter_bytes"] == unmanaged["gradient_bytes"]
        and unmanaged["state_bytes"] >= 2 * unmanaged["parameter_bytes"] > 0
    )
    assert shardplan("simulate", plan, "-q", "--report", report).returncode == 0
    categories = {
        entry["category"]: entry["size_bytes"] for entry in json.loads(report.read_text())["memory"]["peak_by_category"]
    }
    assert categories["unmanaged"] == sum(unmanaged.values())
    text = tmp_path / "plan.txt"
    text.write_text(shardplan("show", plan).stdout)
    assert shardplan("diff", plan, text).returncode == 0, "the text form has it, too"


def test_optimize_takes_no_plan_that_memory_refuses(shardplan, tmp_path):
    plan = tmp_path / "plan.json"
    for budget in BUDGETS[::6]:
        result = shardplan(
            "optimize", TRACE, "--cluster", "h100", "--ranks", "4", "--memory-budget", budget, "-q", "-o", plan
        )
        assert result.returncode in (0, 1), result.stderr
        if result.returncode == 0:
            for command in (["memory", plan], ["simulate", plan, "-q"]):
                assert shardplan(*command, "--memory-budget", budget).returncode == 0, budget
