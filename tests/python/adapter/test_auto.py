# SPDX-License-Identifier: Apache-2.0
"""sp.auto and sp.unit: a script for FSDP2 ported line by line trains as FSDP2 does, bit for bit, under every
setting."""

import auto_equivalence
import pytest
from conftest import plans_in
from equivalence import compare_on_ranks, verdict


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("auto")
    made = {}

    def of(ranks: int) -> list[dict]:
        if ranks not in made:
            cases = [case for case in auto_equivalence.CASES if case.ranks == ranks]
            with plans_in(folder / "plans"):
                plans = {case.name: "" for case in cases}
                made[ranks] = compare_on_ranks(cases, folder / f"ranks{ranks}", plans, compare=auto_equivalence.compare)
        return made[ranks]

    return of


@pytest.mark.parametrize("case", auto_equivalence.CASES, ids=lambda case: case.name)
def test_ported_script(results, case):
    assert verdict(case, results(case.ranks)) == ""
