# SPDX-License-Identifier: Apache-2.0
"""Features besides a plain loop, by a plan and by real FSDP2 on the same ranks: hooks on gradients, optimisers in the
backward, collectives of the user's, models from the meta device. Also whole parameters for a while, steps that leave
the plan, checkpoints of model and optimiser."""

import adapter_features
import adapter_tensor_parallel
import pytest
from adapter_workers import run_on_ranks
from conftest import build_folder
from equivalence_plans import make_plans

NAMES = [feature.__name__ for feature in adapter_features.FEATURES] + [
    "shard_dims", "dropped_gradient", "optimizer_state",
]
# Finished without the plan, a step sums the same numbers with other roundings.
TOLERANCE = {"deviation_is_replanned": 1e-6}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    plans = make_plans(adapter_features.PLANS, folder / "plans", build_folder())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(build_folder() / "bin"), prepend=":")
        patch.setenv("SHARDPLAN_BUILD", str(build_folder()))
        return run_on_ranks(2, folder / "ranks", adapter_features.run_features, plans, str(folder))


@pytest.mark.parametrize("name", NAMES)
def test_feature(outcomes, name):
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None and outcome[0] == "returned", f"rank {rank}: {outcome}"
        difference, where = outcome[1][name]
        assert difference <= TOLERANCE.get(name, 0.0), f"rank {rank}: {difference:.1e} {where}"


@pytest.mark.parametrize("case", adapter_tensor_parallel.CASES, ids=lambda case: case.name)
def test_tensor_parallel_parameters(case, tmp_path):
    plan = adapter_tensor_parallel.make_plan(case, tmp_path / "plans", build_folder())
    for rank, outcome in enumerate(
        run_on_ranks(case.ranks, tmp_path / "ranks", adapter_tensor_parallel.compare, case, plan)
    ):
        assert outcome == ("returned", (0.0, "")), f"rank {rank}: {outcome}"
