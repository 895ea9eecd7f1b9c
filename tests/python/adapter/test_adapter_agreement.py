# SPDX-License-Identifier: Apache-2.0
"""Refusals of apply before anything is communicated: a plan that does not verify, and ranks that are about to do
different things."""

import copy
import json

import adapter_agreement as scenarios
import pytest
from adapter_workers import run_on_ranks
from conftest import installed_pytorch
from test_adapter import plans  # noqa: F401  (a fixture)
from test_adapter_errors import returned


@pytest.fixture(scope="module")
def plan(plans) -> str:  # noqa: F811
    return plans.plan("default", 2)


def first(plan: dict, kind: str) -> tuple[list, int]:
    """The list of instructions of the step that repeats that has the first one of that kind, and its place."""
    for trigger in plan["steps"][-1]["triggers"]:
        for index, instruction in enumerate(trigger["instructions"]):
            if instruction["kind"] == kind:
                return trigger["instructions"], index
    raise LookupError(kind)


def remove(kind: str):
    def edit(plan: dict) -> None:
        instructions, index = first(plan, kind)
        del instructions[index]

    edit.__name__ = f"no_{kind}"
    return edit


def sum_for_average(plan: dict) -> None:
    instructions, index = first(plan, "reduce_scatter")
    del instructions[index]["reduce_op"]


EDITS = [remove(kind) for kind in ("wait", "free", "copy_out", "all_gather", "reduce_scatter")] + [sum_for_average]


def edited(plan: str, edit, folder) -> str:
    document = json.loads(open(plan).read())
    edit(document)
    path = folder / f"{edit.__name__}.json"
    path.write_text(json.dumps(document))
    return str(path)


def test_edited_plans_are_refused_with_rule_place_and_way_out(plan, tmp_path):
    paths = [edited(plan, edit, tmp_path) for edit in EDITS]
    for said in returned(run_on_ranks(2, tmp_path / "ranks", scenarios.apply_plans, paths)):
        for edit, words in zip(EDITS, said):
            assert "does not verify" in words and "/steps/" in words and "verify=False" in words, (
                f"{edit.__name__}: {words}"
            )
        assert "grad_division" in said[-1]


def test_verify_false_applies_with_a_warning(plan, tmp_path):
    path = edited(plan, remove("free"), tmp_path)
    for said in returned(run_on_ranks(2, tmp_path / "ranks", scenarios.apply_plan, path, {"verify": False})):
        assert said.startswith("applied") and "not verified" in said


def test_a_plan_of_another_release_warns_once_and_names_both(plans, tmp_path):  # noqa: F811
    installed = installed_pytorch()
    own, other = (
        plans.plan("default", 2, release) for release in (installed, "2.11" if installed != "2.11" else "2.15")
    )
    for of_own, of_other in returned(run_on_ranks(2, tmp_path / "ranks", scenarios.apply_plans, [own, other])):
        assert of_own == "applied"
        assert of_other.count("warned") == 1 and "FSDP of PyTorch" in of_other, of_other
        assert "2.11" in of_other and f"PyTorch {installed} is installed" in of_other, of_other


def test_ranks_with_different_plans_are_named(plans, plan, tmp_path):  # noqa: F811
    document = json.loads(open(plan).read())
    other = copy.deepcopy(document)
    other["tokens_per_step"] = 1 + document.get("tokens_per_step", 0)
    path = tmp_path / "other.json"
    path.write_text(json.dumps(other))
    said = returned(run_on_ranks(3, tmp_path / "ranks", scenarios.apply_own_plan, [plan, str(path), plan]))
    for words in said:
        assert "the plan differs" in words and "on ranks 0 and 2" in words and "on rank 1" in words, words


def test_ranks_with_different_models_are_named(plan, tmp_path):
    for words in returned(run_on_ranks(2, tmp_path, scenarios.with_another_buffer, plan)):
        assert "the model" in words and "differs" in words and "on rank 0" in words and "on rank 1" in words, words


def test_ranks_with_plans_for_other_numbers_of_ranks_are_named(plans, plan, tmp_path):  # noqa: F811
    fitting = plans.plan("default", 3)
    said = returned(run_on_ranks(3, tmp_path / "ranks", scenarios.apply_own_plan, [fitting, fitting, plan]))
    for words in said:
        assert "the plan differs" in words and "on ranks 0 and 1" in words and "on rank 2" in words, words


def test_ranks_with_different_versions_are_named(plan, tmp_path):
    for words in returned(run_on_ranks(2, tmp_path, scenarios.with_another_version, plan)):
        assert "shardplan's version differs" in words and "0.0.1 on rank 1" in words, words


def test_a_rank_whose_plan_is_refused_tells_the_others(plan, tmp_path):
    broken = edited(plan, remove("copy_out"), tmp_path)
    good, bad = returned(run_on_ranks(2, tmp_path / "ranks", scenarios.apply_own_plan, [plan, broken]))
    assert "does not verify" in bad and not bad.startswith("rank")
    assert "rank 1: " in good and "does not verify" in good, good


def test_a_rank_that_does_not_come_is_named_within_the_timeout(plan, tmp_path):
    (words, seconds), _ = returned(
        run_on_ranks(2, tmp_path, scenarios.rank_1_does_not_come, plan, timeout_s=3)
    )
    assert "rank 1 did not arrive" in words and seconds < 10
