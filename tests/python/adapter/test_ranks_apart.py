# SPDX-License-Identifier: Apache-2.0
"""Ranks that make different gradients: they train as one process would, or all of them say where each went, before
anything wrong is added."""

import json
import os
import random
import re
import subprocess

import pytest
import ranks_apart
from adapter_workers import run_on_ranks
from conftest import ROOT, build_folder, plans_in


def returned(outcomes: list) -> list:
    assert all(outcome is not None and outcome[0] == "returned" for outcome in outcomes), outcomes
    return [outcome[1] for outcome in outcomes]


def sets_by_chance(ranks: int, steps: int, seed: int) -> list[list[list[int]]]:
    """Mostly the same in each step, as a router that changes seldom."""
    chance = random.Random(seed)
    own = [sorted(chance.sample(range(4), chance.randint(1, 4))) for _ in range(ranks)]
    return [
        [sorted(chance.sample(range(4), chance.randint(1, 4))) if chance.random() < 0.2 else one for one in own]
        for _ in range(steps)
    ]


OTHER = [[0, 1], [1, 2]]  # as many
SMALLER = [[0, 1, 2, 3], [1]]
ALIKE = [[0, 1], [0, 1]]


@pytest.mark.parametrize("sets", [OTHER, SMALLER, SMALLER[::-1], [[0], [0, 1, 2]]], ids=str)
def test_gradients_are_those_of_one_process(sets, tmp_path):
    with plans_in(tmp_path / "plans"):
        for largest, _ in returned(run_on_ranks(2, tmp_path / "ranks", ranks_apart.auto, [sets] * 4)):
            assert largest < 1e-6


def test_ranks_that_differ_are_named_with_what_each_made(tmp_path):
    with plans_in(tmp_path / "plans"):
        for _, warned in returned(run_on_ranks(2, tmp_path / "ranks", ranks_apart.auto, [OTHER] * 3)):
            told = [text for text in warned if "ranks went different ways" in text]
            assert len(told) == 1, warned
            assert re.search(
                r"rank 0 passed post_backward of layers.1 with .*experts\.0.*; rank 1 passed .*experts\.2", told[0]
            ), told[0]


def test_a_rank_that_has_less_in_one_step_goes_on_with_zeros(tmp_path):
    with plans_in(tmp_path / "plans"):
        outcomes = returned(
            run_on_ranks(
                2, tmp_path / "ranks", ranks_apart.auto, [ALIKE, ALIKE, ALIKE, [[0, 1], [1]], ALIKE, [[0], [0, 1]]]
            )
        )
    for rank, (largest, warned) in enumerate(outcomes):
        assert largest < 1e-6
        assert sum("on this rank alone" in text for text in warned) == 1, (rank, warned)


def test_a_rank_that_has_more_ends_all_before_it_is_added(tmp_path):
    """The others have reduced without it: nobody can go on. All say so, with both points."""
    with plans_in(tmp_path / "plans"):
        outcomes = run_on_ranks(
            2, tmp_path / "ranks", ranks_apart.auto, [ALIKE, ALIKE, ALIKE, [[0, 1], [0, 1, 2]]], timeout_s=20
        )
    for outcome in outcomes:
        assert outcome[0] == "raised" and "the ranks go different ways" in outcome[1], outcome
        assert (
            "rank 1: found post_backward layers.1, where parameter layers.1.experts.2.weight got a gradient"
            in outcome[1]
        ), outcome[1]
        assert "rank 0: as planned, in " in outcome[1], outcome[1]


@pytest.mark.parametrize("seed", [int(os.environ.get("SHARDPLAN_SEED", 7))])
def test_random_sets_on_three_ranks(seed, tmp_path):
    print("seed", seed)
    sets = sets_by_chance(3, 8, seed)
    with plans_in(tmp_path / "plans"):
        outcomes = run_on_ranks(3, tmp_path / "ranks", ranks_apart.auto, sets, timeout_s=20)
    for outcome in outcomes:
        apart = outcome[0] == "raised" and "the ranks go different ways" in outcome[1]
        assert apart or (outcome[0] == "returned" and outcome[1][0] < 1e-6), (seed, sets, outcome)


def test_experts_that_are_units_end_all_with_both_points(tmp_path):
    with plans_in(tmp_path / "plans"):
        said = returned(run_on_ranks(2, tmp_path / "ranks", ranks_apart.experts_are_units, [OTHER] * 2, timeout_s=20))
    for text in said:
        assert "the ranks go different ways" in text and "rank 0: " in text and "rank 1: " in text, text
        assert "layers.0.experts" in text, text


def test_without_a_fallback_both_ends_say_where_each_went(tmp_path):
    trace, plan = tmp_path / "trace.json", tmp_path / "plan.json"
    command = [
        str(build_folder() / "bin" / "shardplan"), "plan", str(trace), "--ranks", "2", "--unit", "layers.*", "-q", "-o",
        str(plan),
    ]
    trace.write_text(json.dumps(ranks_apart.outline_of(ALIKE[0])))
    subprocess.run(command, cwd=ROOT, check=True)
    outcomes = run_on_ranks(
        2, tmp_path / "ranks", ranks_apart.stops, str(plan), [ALIKE, ALIKE, [[0, 1], [1]]], timeout_s=20
    )
    (own,), (other,) = [outcome[1] for outcome in outcomes][::-1]
    assert own.startswith("step 2: ") and "layers.1.experts.0.weight got no gradient" in own, own
    assert (
        "the ranks go different ways: rank 1: found post_backward layers.1" in other
        and "rank 0: as planned, in " in other
    ), other
