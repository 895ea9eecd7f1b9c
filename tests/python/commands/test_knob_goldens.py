# SPDX-License-Identifier: Apache-2.0
"""Each knob's golden plan differs from the default as its difference.txt says, and docs/reference/knobs-*.md tells
exactly that."""

import sys

import pytest
from conftest import ROOT, build_folder

sys.path.insert(0, str(ROOT / "tests" / "planner" / "goldens"))
import goldens  # noqa: E402

POLICIES = [policy for policy in goldens.POLICIES if (goldens.GOLDENS / policy / "cases.txt").exists()]
CASES = [golden for policy in POLICIES for golden in goldens.goldens(policy)]
HINT = "read the difference; if it is right, run dev/update_goldens"


@pytest.mark.parametrize("golden", CASES, ids=lambda golden: golden.name)
def test_plan_differs_as_the_golden_says(golden):
    program = build_folder() / "bin" / "shardplan"
    assert goldens.difference(golden, program) == golden.expected.read_text(), HINT


@pytest.mark.parametrize("policy", POLICIES)
def test_page_is_made_of_the_goldens(policy):
    assert goldens.document(policy) == goldens.page(policy).read_text(), HINT


@pytest.mark.parametrize("policy", POLICIES)
def test_every_folder_is_listed(policy):
    folders = {path.parent.name for path in (goldens.GOLDENS / policy).glob("*/strategy.json")}
    assert folders == {golden.folder.name for golden in goldens.goldens(policy)}
