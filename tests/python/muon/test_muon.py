# SPDX-License-Identifier: Apache-2.0
"""sp.Muon on Gloo ranks next to torch.optim.Muon in one process."""

import functools
import random

import muon_ranks
import pytest
from adapter_workers import run_on_ranks

CASES = [(case.name, ranks) for case in muon_ranks.CASES for ranks in case.ranks]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    @functools.cache
    def of_ranks(ranks: int) -> list:
        cases = [case for case in muon_ranks.CASES if ranks in case.ranks]
        return run_on_ranks(ranks, tmp_path_factory.mktemp("muon"), muon_ranks.compare_all, cases, ranks)

    return of_ranks


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_equals_one_process(outcomes, name, ranks):
    for rank, outcome in enumerate(outcomes(ranks)):
        assert outcome is not None and outcome[0] == "returned", f"rank {rank}: {outcome}"
        assert outcome[1][name] == "", f"rank {rank}"


def test_drawn_cases_equal_one_process():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    assert muon_ranks.run_drawn(seed, 8) == []
