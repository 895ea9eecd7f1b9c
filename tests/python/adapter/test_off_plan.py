# SPDX-License-Identifier: Apache-2.0
"""Actions of a user that a plan does not have end as under real FSDP2 or FSDP1, bit for bit, or with a message that
names the way out (off_plan.py prints the table). SHARDPLAN_OFF_PLAN=all runs every case (dev/off_plan),
SHARDPLAN_OFF_PLAN=40+10 ten of them from the 41st on (tools/nightly); else one or two of each kind."""

import os

import off_plan
import off_plan_all  # noqa: F401, all cases
import pytest
from conftest import build_folder
from off_plan_wrong import WRONG

SUITE = [
    "tied_after_a_step",
    "untied_after_apply",
    "parameter_frozen",
    "flat_parameter_frozen",
    "to_bfloat16",
    "flat_orig_to_bfloat16",
    "copied_after_apply",
    "flat_orig_checkpoint",
    "flat_checkpoint_flattened",
    "flat_loaded_from_rank_0",
    "flat_orig_raw_optimizer_state",
    "flat_whole_state",
    "between_units_record",
    "between_units_record_bf16",
    "between_units_custom",
    "reentrant_checkpoint_of_units",
    "unit_called_without_gradients",
    "unit_skipped",
    "two_models",
    "never_zeroed",
    "accumulated_as_planned",
    "evaluated_between_forward_and_backward",
]


def chosen(which: str) -> list[str]:
    if which == "all":
        return list(off_plan.CASES)
    first, _, count = which.partition("+")
    return list(off_plan.CASES)[int(first) :][: int(count)] if which else SUITE


NAMES = chosen(os.environ.get("SHARDPLAN_OFF_PLAN", ""))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(build_folder() / "bin"), prepend=":")
        return off_plan.run_all(NAMES, tmp_path_factory.mktemp("off_plan"), build_folder())


@pytest.mark.parametrize("name", NAMES)
def test_case(results, name):
    case, result = off_plan.CASES[name], results[name]
    assert result["torch"]["what"] in ("runs", "raises", "hangs"), result["torch"]
    wrong = {kind: said for kind, said in off_plan.verdicts(case, result).items() if said}
    unknown = {kind: said for kind, said in wrong.items() if kind not in WRONG.get(name, ())}
    assert not unknown, f"{name}: {unknown}"
    mended = [kind for kind in WRONG.get(name, ()) if kind not in wrong]
    assert not mended, f"{name}: mended: take {mended} out of off_plan_wrong.py"


def test_wrong_ones_are_cases():
    assert WRONG.keys() <= off_plan.CASES.keys()
