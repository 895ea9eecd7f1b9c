# SPDX-License-Identifier: Apache-2.0
"""sp.auto(model, optimizer="muon") plans owners, and sp.Muon follows them."""

import muon_auto
import pytest
from adapter_workers import run_on_ranks
from conftest import build_folder


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By number of ranks."""
    folder = tmp_path_factory.mktemp("auto")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(build_folder() / "bin"), prepend=":")
        patch.setenv("SHARDPLAN_BUILD", str(build_folder()))
        result = {}
        for ranks in (2, 4):
            cases = [case for case in muon_auto.CASES if case.replicas * case.shards == ranks]
            result[ranks] = run_on_ranks(ranks, folder / str(ranks), muon_auto.compare_all, cases)
        return result


@pytest.mark.parametrize("case", muon_auto.CASES, ids=lambda case: case.name)
def test_trains_by_the_plan_of_auto(outcomes, case):
    for rank, outcome in enumerate(outcomes[case.replicas * case.shards]):
        assert outcome is not None and outcome[0] == "returned", f"rank {rank}: {outcome}"
        assert outcome[1][case.name] == "", f"rank {rank}"
