# SPDX-License-Identifier: Apache-2.0
"""Parameters changed after a plan was applied: taken over as FSDP2 does, or refused by name. And plans whose buffers
have addresses of their own."""

import adapter_changes
import pytest
from adapter_workers import run_on_ranks
from conftest import build_folder
from equivalence_plans import make_plans

NAMES = [change.__name__ for change in adapter_changes.CHANGES] + [
    f"arena {c.name}" for c in adapter_changes.IN_AN_ARENA
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("changes")
    plans = make_plans(list(adapter_changes.IN_AN_ARENA), folder / "plans", build_folder())
    return run_on_ranks(2, folder / "ranks", adapter_changes.run_changes, plans)


@pytest.mark.parametrize("name", NAMES)
def test_change(outcomes, name):
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None and outcome[0] == "returned", f"rank {rank}: {outcome}"
        difference, where = outcome[1][name]
        assert difference == 0.0, f"rank {rank}: {difference:.1e} {where}"
