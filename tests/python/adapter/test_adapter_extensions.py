# SPDX-License-Identifier: Apache-2.0
"""All-gather extensions and units of several dtypes: training by a plan equals real FSDP2, bit for bit."""

import json
import pathlib

import adapter_extensions
import equivalence_plans
import pytest
from adapter_workers import run_on_ranks
from conftest import build_folder
from equivalence_plans import make_plans


def make_mixed_plans(folder: pathlib.Path) -> dict[str, str]:
    """A trace is in one compute dtype; the frozen parameters of these models are not."""
    make_plans(adapter_extensions.MIXED, folder, build_folder())
    plans = {}
    for number, case in enumerate(adapter_extensions.MIXED):
        trace = folder / f"{case.model}{number}.trace.json"
        document = json.loads(trace.read_text())
        for parameter in document["parameters"]:
            if not parameter.get("requires_grad", True):
                parameter["dtype"] = "float64"
        trace.write_text(json.dumps(document))
        plans[case.name] = equivalence_plans.plan(case, trace, folder)
    return plans


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extensions")
    extended = [case for case, _ in adapter_extensions.EXTENDED]
    plans = make_plans(extended, folder / "plans", build_folder())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDPLAN_BUILD", str(build_folder()))
        patch.setenv("PATH", str(build_folder() / "bin"), prepend=":")
        plans |= make_mixed_plans(folder / "mixed")
        return run_on_ranks(2, folder / "ranks", adapter_extensions.run_all, plans)


def results(outcomes, name: str) -> list:
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None and outcome[0] == "returned", f"rank {rank}: {outcome}"
    return [outcome[1][name] for outcome in outcomes]


@pytest.mark.parametrize("case", adapter_extensions.CASES, ids=lambda case: case.name)
def test_equals_fsdp2(outcomes, case):
    for rank, (difference, where) in enumerate(results(outcomes, case.name)):
        assert difference == 0.0, f"rank {rank}: {difference:.1e} {where}"


@pytest.mark.parametrize("name", ["bfloat16_uneven", "float8"])
def test_beside_the_plan(outcomes, name):
    for rank, (difference, where) in enumerate(results(outcomes, f"{name} beside the plan")):
        assert difference == 0.0, f"rank {rank}: {difference:.1e} {where}"


def test_what_is_not_the_plans_is_refused(outcomes):
    for plain, another in results(outcomes, "refusals"):
        assert "parameter layers.0.up.weight of layers.0: all-gather extension expected True, found False" in plain
        assert "parameter layers.0.up.weight: fsdp_pre_all_gather is planned to give [('bfloat16', " in another
