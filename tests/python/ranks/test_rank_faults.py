# SPDX-License-Identifier: Apache-2.0
"""Ranks that die or are stopped, and signals to the launcher, with real processes: a sample of what tools/nightly
tries."""

import pathlib
import signal

import pytest
from conftest import build_folder
from rank_faults import Fault, attempt, blamed
from rank_runs import HSDP, Starter, make_plan

FAULTS = [
    Fault("run", "run", "3", signal.SIGKILL, 1, connecting=True, after_s=0.3),
    Fault("run", "run", "3", signal.SIGTERM, -1),
    Fault("run", "run", "3", signal.SIGKILL, -1),
    Fault("hand", "run", "2x2", signal.SIGKILL, 3),  # those that share no communicator with it name it, too
    Fault("hand", "run", "3", signal.SIGSTOP, 0),  # it serves the store
    Fault("torchrun", "run", "2x2", signal.SIGKILL, 2),
    Fault("torchrun", "apply", "3", signal.SIGKILL, 1),
    Fault("hand", "apply", "3", signal.SIGSEGV, 2),
    Fault("hand", "apply", "2x2", signal.SIGSTOP, 1),
]


@pytest.fixture(scope="module")
def starter() -> Starter:
    return Starter(build_folder(), timeout_s=6)


@pytest.fixture(scope="module")
def plans(starter, tmp_path_factory) -> dict[str, pathlib.Path]:
    folder = tmp_path_factory.mktemp("plans")
    made = {"3": make_plan(starter.shardplan(), folder, 3), "2x2": make_plan(starter.shardplan(), folder, 4, HSDP)}
    return made | {"another": make_plan(starter.shardplan(), folder, 3, tokens=9)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.describe())
def test_everybody_ends_and_names_the_one_that_did_it(fault, starter, plans, tmp_path):
    outcome = attempt(fault, starter, plans, tmp_path / "ranks")
    assert not outcome.wrong, f"{outcome.wrong}\n{outcome.text}"


def test_ranks_whose_model_outlives_its_group_end_in_good_order(plans, tmp_path):
    started = Starter(build_folder(), timeout_s=60, steps=3).start("hand", "apply", plans["3"], 3, tmp_path / "ranks")
    try:
        codes = [process.wait(240) for process in started.processes]
    finally:
        started.end()
    assert codes == [0, 0, 0], started.text()
    assert "step 2 took" in started.text() and "has died" not in started.text(), started.text()


def test_blamed_reads_all_ranks_of_a_message():
    assert blamed("rank 1: ranks 0 to 2 and 5 did not arrive: ...") == {0, 1, 2, 5}
    assert blamed("rank 1: rank 3 has died\nrank 1: rank 3 did not arrive: it has died") == {3}
    assert blamed("rank 1: step 4 took 2 ms") == set()


def test_ranks_with_different_plan_files_are_named_on_all(starter, plans, tmp_path):
    for rank, plan in enumerate(("3", "another", "3")):
        (tmp_path / f"{rank}.json").write_bytes(plans[plan].read_bytes())
    started = starter.start("hand", "run", tmp_path / "%RANK%.json", 3, tmp_path / "ranks")
    try:
        codes = [process.wait(20) for process in started.processes]
    finally:
        started.end()
    assert codes == [1, 1, 1], started.text()
    for rank in range(3):
        assert "the plan differs" in started.text(rank), started.text(rank)
        assert "on ranks 0 and 2" in started.text(rank) and "on rank 1" in started.text(rank)
