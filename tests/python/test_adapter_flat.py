"""Training by an fsdp1 plan equals training under real FullyShardedDataParallel, run live on the same ranks."""

import flat_equivalence
import pytest
from adapter_workers import run_on_ranks
from conftest import build_folder
from equivalence import compare_all
from equivalence_plans import make_plans
from flat_settings import CASES

RANKS = sorted({case.ranks for case in CASES})


@pytest.fixture(scope="session")
def flat_plans(tmp_path_factory) -> dict[str, str]:
    return make_plans(CASES, tmp_path_factory.mktemp("flat_plans"), build_folder())


@pytest.fixture(scope="session")
def outcomes(flat_plans, tmp_path_factory):
    """By number of ranks: all cases in one set of processes; starting them takes longer than a case."""
    results = {}
    for ranks in RANKS:
        cases = [case for case in CASES if case.ranks == ranks]
        folder = tmp_path_factory.mktemp("ranks")
        results[ranks] = run_on_ranks(ranks, folder, compare_all, cases, flat_plans, flat_equivalence.compare, timeout_s=60)
    return results


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_fsdp1(outcomes, case):
    for rank, outcome in enumerate(outcomes[case.ranks]):
        assert outcome is not None, f"rank {rank} died"
        assert outcome[0] == "returned", f"rank {rank}: {outcome[1:]}"
        result = outcome[1][case.name]
        assert result[0] == "difference", f"rank {rank}: {result[2]}"
        assert result[1] <= case.tolerance, f"rank {rank}: {result[2]} differs by {result[1]:.1e} (relative)"
