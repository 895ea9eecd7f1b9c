# SPDX-License-Identifier: Apache-2.0
"""Optimizer state dicts by FSDP1's names: what real FSDP1 makes of the same training, and back, on two ranks."""

import dataclasses

import pytest
from adapter_workers import run_on_ranks
from conftest import build_folder
from equivalence_plans import make_plans
from flat_settings import case
from optim_states import SCENARIOS, run_all

CASES = [case("full"), case("full_orig", use_orig_params=True), case("gpt_tied", model="gpt")]
FSDP2 = dataclasses.replace(CASES[0], name="fsdp2", strategy={"policy": "fsdp2", "units": CASES[0].strategy["units"]})
RUNS = [(scenario, c) for scenario in SCENARIOS for c in CASES] + [("per_parameter", FSDP2)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    plans = make_plans([*CASES, FSDP2], tmp_path_factory.mktemp("plans"), build_folder())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(build_folder() / "bin"), prepend=":")
        return run_on_ranks(2, tmp_path_factory.mktemp("ranks"), run_all, RUNS, plans)


@pytest.mark.parametrize(("scenario", "c"), RUNS, ids=lambda value: getattr(value, "name", value))
def test_as_fsdp1(outcomes, scenario, c):
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None and outcome[0] == "returned", f"rank {rank}: {outcome}"
        wrong = [what for what, holds in outcome[1][scenario, c.name].items() if not holds]
        assert not wrong, f"rank {rank}: {wrong}"
