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


@pytest.mark.parametrize("case", muon_planned.CASES, ids=lambda case: case.name)
def test_trains_by_the_plan(outcomes, case):
    for rank, outcome in enumerate(outcomes[case.replicas * case.shards]):
        assert outcome is not None and outcome[0] == "returned", f"rank {rank}: {outcome}"
        assert outcome[1][case.name] == "", f"rank {rank}"
