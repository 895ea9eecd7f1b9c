# SPDX-License-Identifier: Apache-2.0
"""sp.Muon by plans of `shardplan plan --optimizer muon`."""

import muon_planned
import pytest
from adapter_workers import run_on_ranks
from conftest import build_folder


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By number of ranks."""
    folder = tmp_path_factory.mktemp("planned")
    plans = muon_planned.make_plans(folder, build_folder())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDPLAN_BUILD", str(build_folder()))
        result = {}
        for ranks in (2, 4):
            cases = [case for case in muon_planned.CASES if case.replicas * case.shards == ranks]
            result[ranks] = run_on_ranks(ranks, folder / str(ranks), muon_planned.compare_all, cases, plans)
        return result


def test_a_loop_that_changes_gradients_is_refused(tmp_path):
    case = next(case for case in muon_planned.CASES if case.name == "in_backward_of_two")
    plans = muon_planned.make_plans(tmp_path, build_folder())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDPLAN_BUILD", str(build_folder()))
        outcomes = run_on_ranks(2, tmp_path / "ranks", muon_planned.refused, case, plans[case.name])
    changed, another = "its gradient was changed behind the backward", "another gradient has come"
    for outcome in outcomes:
        assert outcome is not None and outcome[0] == "returned", outcome
        for name in ("ours", "fsdp2"):
            assert f"parameter 1.2.0.weight: {changed}" in outcome[1][f"{name}, clipped"]
            assert f"parameter 1.2.0.weight: {another}" in outcome[1][f"{name}, two backwards"]


def test_a_loop_that_leaves_its_plan_goes_on_with_exchanges_in_step(tmp_path):
    plans = muon_planned.make_plans(tmp_path, build_folder())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDPLAN_BUILD", str(build_folder()))
        words = plans["in_backward_accumulated"], plans["shards"]
        outcomes = run_on_ranks(2, tmp_path / "ranks", muon_planned.leaves_its_plan, *words)
    assert outcomes == [("returned", ([3, 3, 0, 0, 0], ""))] * 2


@pytest.mark.parametrize("case", muon_planned.CASES, ids=lambda case: case.name)
def test_trains_by_the_plan(outcomes, case):
    for rank, outcome in enumerate(outcomes[case.replicas * case.shards]):
        assert outcome is not None and outcome[0] == "returned", f"rank {rank}: {outcome}"
        assert outcome[1][case.name] == "", f"rank {rank}"
