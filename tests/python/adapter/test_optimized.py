# SPDX-License-Identifier: Apache-2.0
"""Plans of `shardplan optimize` train with the numbers of FSDP2's defaults, bit for bit on two ranks and on two
replicas of two. Gradients of micro-batches that are added before they are reduced differ
(docs/reference/optimize.md)."""

import pytest
from conftest import build_folder
from equivalence import compare_on_ranks, verdict
from optimized_cases import JOBS, compare, make


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimized")
    cases, plans = make(folder, build_folder())
    outcomes = {}
    for ranks in sorted({case.ranks for case in cases}):
        alike = [case for case in cases if case.ranks == ranks]
        by_rank = compare_on_ranks(alike, folder / f"ranks{ranks}", plans, compare)
        outcomes |= {case.name: (case, by_rank) for case in alike}
    return outcomes


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_optimized_plan_trains_as_fsdp2(results, job):
    assert verdict(*results[job.name]) == ""
