# SPDX-License-Identifier: Apache-2.0
"""Random models and settings of fsdp1: training by a plan equals real FullyShardedDataParallel, bit for bit."""

import flat_equivalence
import pytest
from conftest import build_folder
from equivalence_random import run
from flat_random import make_case

# More: tools/nightly --only adapter.
SEEDS = [*range(5), 50]  # 50: a frozen unit's inputs are done while frees of the node before them are left


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    cases = [make_case(seed) for seed in SEEDS]
    return run(cases, tmp_path_factory.mktemp("random"), build_folder(), flat_equivalence.compare)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_model_and_setting(verdicts, seed):
    case = make_case(seed)
    assert verdicts[case.name] == "", f"{case}"
