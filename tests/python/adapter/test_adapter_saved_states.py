# SPDX-License-Identifier: Apache-2.0
"""sp.save and sp.load: written on two ranks by one policy, loaded on three by the other, and by real FSDP2."""

import dataclasses

import pytest
import saved_states
from adapter_workers import run_on_ranks
from conftest import build_folder
from equivalence_plans import make_plans
from flat_settings import case


def of_policy(policy: str, ranks: int):
    made = case(f"{policy}_{ranks}", ranks=ranks)
    if policy == "fsdp1":
        return made
    return dataclasses.replace(made, strategy={"policy": policy, "units": made.strategy["units"]})


CASES = {(policy, ranks): of_policy(policy, ranks) for policy in ("fsdp1", "fsdp2") for ranks in (2, 3)}


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    return make_plans(list(CASES.values()), tmp_path_factory.mktemp("plans"), build_folder())


@pytest.mark.parametrize("written, loaded", [("fsdp1", "fsdp2"), ("fsdp2", "fsdp1")])
def test_another_job_finds_what_was_saved(written, loaded, plans, tmp_path):
    writer, reader = CASES[written, 2], CASES[loaded, 3]
    (tmp_path / "saved").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(build_folder() / "bin"), prepend=":")
        for function, of_case in ((saved_states.write, writer), (saved_states.read, reader)):
            outcomes = run_on_ranks(
                of_case.ranks, tmp_path / function.__name__, function, of_case, plans[of_case.name],
                str(tmp_path / "saved"),
            )
            for rank, outcome in enumerate(outcomes):
                assert outcome is not None and outcome[0] == "returned", f"rank {rank}: {outcome}"
                assert all(outcome[1].values()), f"rank {rank}: {outcome[1]}"
