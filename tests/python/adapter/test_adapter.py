# SPDX-License-Identifier: Apache-2.0
"""Training by a plan equals training under real FSDP2, run live on the same ranks, bit for bit.

Both call the same collectives on buffers of the same layout, so also the reduction order is the same.
"""

import os

import pytest
from adapter_cases import CASES, compare_cases
from adapter_plans import PlanShop
from adapter_workers import run_on_ranks
from conftest import build_folder

FSDP2_CASES = list(CASES)


@pytest.fixture(scope="session")
def plans(tmp_path_factory) -> PlanShop:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(build_folder() / "bin"), prepend=":")
        patch.setenv("SHARDPLAN_BUILD", str(build_folder()))
        yield PlanShop(tmp_path_factory.mktemp("plans"))


RANKS = [2, 3] if os.environ.get("SHARDPLAN_ALL_SETTINGS") else [3]  # 3: uneven shards, too; tools/nightly has both


@pytest.fixture(scope="module", params=RANKS, ids=[f"{ranks} ranks" for ranks in RANKS])
def outcomes(request, plans, tmp_path_factory):
    """All cases in one set of processes; starting them takes longer than a case."""
    paths = {name: plans.plan(name, request.param) for name in FSDP2_CASES}
    return run_on_ranks(request.param, tmp_path_factory.mktemp("ranks"), compare_cases, paths)


@pytest.mark.parametrize("case", FSDP2_CASES)
@pytest.mark.parametrize("what", ["losses", "parameters", "optimizer states"])
def test_equals_fsdp2_bit_for_bit(outcomes, case, what):
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None, f"rank {rank} died"
        assert outcome[0] == "returned", f"rank {rank}: {outcome[1:]}"
        difference, where = outcome[1][case][what]
        assert difference == 0.0, f"rank {rank}: {where} differs by {difference:.1e} (relative)"
