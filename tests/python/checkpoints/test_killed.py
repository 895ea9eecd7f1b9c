# SPDX-License-Identifier: Apache-2.0
import os

import pytest
from killed import kill_and_go_on


@pytest.mark.parametrize("seed", [int(s) for s in os.environ.get("SHARDPLAN_SEED", "1").split()])
def test_a_run_that_is_killed_goes_on(seed, tmp_path):
    counts = kill_and_go_on(tmp_path, kills=3, seed=seed, megabytes=16)
    assert counts["killed"] == 3
    assert counts["resumed"] >= 1, "no run used what a killed one had written"
