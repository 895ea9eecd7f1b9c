# SPDX-License-Identifier: Apache-2.0
"""Training by an fsdp1 plan equals training under real FullyShardedDataParallel, run live on the same ranks."""

import flat_equivalence
import pytest
from conftest import build_folder
from equivalence import compare_on_ranks, verdict
from equivalence_plans import make_plans
from flat_settings import CASES

RANKS = sorted({case.ranks for case in CASES})


@pytest.fixture(scope="session")
def flat_plans(tmp_path_factory) -> dict[str, str]:
    return make_plans(CASES, tmp_path_factory.mktemp("flat_plans"), build_folder())


@pytest.fixture(scope="session")
def results(flat_plans, tmp_path_factory):
    """By number of ranks."""
    made = {}
    for ranks in RANKS:
        cases = [case for case in CASES if case.ranks == ranks]
        made[ranks] = compare_on_ranks(cases, tmp_path_factory.mktemp("ranks"), flat_plans, flat_equivalence.compare)
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_fsdp1(results, case):
    assert verdict(case, results[case.ranks]) == ""
