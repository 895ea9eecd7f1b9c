# SPDX-License-Identifier: Apache-2.0
"""Every setting of the fsdp2 policy, and families of models: training by a plan equals real FSDP2, bit for bit.

Both run live on the same ranks (equivalence.py). One set of processes runs all cases of a number of ranks.
"""

import pytest
from adapter_workers import run_on_ranks
from conftest import build_folder
from equivalence import compare_on_ranks, said_by_fsdp2, verdict
from equivalence_cases import ALL, FAMILIES, SETTINGS
from equivalence_plans import make_plans
from equivalence_random import make_case
from equivalence_random import run as run_random
from equivalence_settings import TIED_ACROSS_UNITS, TIES_ARE_REFUSED


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """ranks -> what each rank returned; plans are made at once, ranks started when first asked for."""
    folder = tmp_path_factory.mktemp("equivalence")
    plans = make_plans(ALL, folder / "plans", build_folder())
    made = {}

    def of(ranks: int) -> list[dict]:
        if ranks not in made:
            cases = [case for case in ALL if case.ranks == ranks]
            made[ranks] = compare_on_ranks(cases, folder / f"ranks{ranks}", plans)
        return made[ranks]

    return of


@pytest.mark.parametrize("case", SETTINGS, ids=lambda case: case.name)
def test_setting(results, case):
    assert verdict(case, results(case.ranks)) == ""


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_family(results, case):
    assert verdict(case, results(case.ranks)) == ""


@pytest.mark.skipif(not TIES_ARE_REFUSED, reason="the installed FSDP2 trains a copy in each unit: test_setting")
@pytest.mark.parametrize("case", TIED_ACROSS_UNITS, ids=lambda case: case.name)
def test_ties_across_units_are_refused_as_fsdp2_refuses_them(case, tmp_path):
    with pytest.raises(RuntimeError, match="the parameter [a-z0-9.]+ is shared by modules of two units"):
        make_plans([case], tmp_path / "plans", build_folder())
    for outcome in run_on_ranks(case.ranks, tmp_path / "ranks", said_by_fsdp2, case):
        assert (
            outcome[0] == "returned"
            and "is shared with a parameter already managed by another FSDP group" in outcome[1]
        ), outcome


SEEDS = range(6)  # more: tools/nightly --only adapter


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    return run_random([make_case(seed) for seed in SEEDS], tmp_path_factory.mktemp("random"), build_folder())


@pytest.mark.parametrize("seed", SEEDS)
def test_random_model_and_setting(verdicts, seed):
    case = make_case(seed)
    assert verdicts[case.name] == "", f"{case}"
