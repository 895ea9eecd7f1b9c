# SPDX-License-Identifier: Apache-2.0
"""torch.profiler beside a plan: the ranges that FSDP2 records, under its names."""

import collections
import json
import pathlib

import adapter_profiler
import pytest
from adapter_workers import run_on_ranks
from conftest import build_folder
from equivalence_plans import make_plans

# Ranges of FSDP2 in which it has nothing to do: a prefetch of a gathered unit. A plan has no instruction there.
ONLY_FSDP2 = {"keeps": {"FSDP::backward_prefetch for layers.0"}}


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    return make_plans(adapter_profiler.CASES, tmp_path_factory.mktemp("profiled") / "plans", build_folder())


@pytest.fixture(scope="module")
def outcomes(plans, tmp_path_factory):
    return run_on_ranks(
        2, tmp_path_factory.mktemp("profiled") / "ranks", adapter_profiler.ranges_of_all, adapter_profiler.CASES, plans
    )


@pytest.mark.parametrize("name", [of.name for of in adapter_profiler.CASES])
def test_the_ranges_are_those_of_fsdp2(outcomes, name):
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None and outcome[0] == "returned", f"rank {rank}: {outcome}"
        ours, theirs, _ = outcome[1][name]
        assert theirs - ours == ONLY_FSDP2.get(name, set()), f"rank {rank}"
        assert ours - theirs == set(), f"rank {rank}"
        assert len(ours) > 20, f"rank {rank}: {ours}"


@pytest.mark.parametrize("name", [of.name for of in adapter_profiler.CASES])
def test_every_instruction_of_the_step_has_a_range(outcomes, plans, name):
    """But for compute, behind which the model runs. The end of a step (zero_grad) is passed with the next forward: the
    range is of the step before."""
    document = json.loads(pathlib.Path(plans[name]).read_text())
    step = document["steps"][document.get("steady_step", 0)]
    planned = collections.Counter(
        one["kind"]
        for trigger in step["triggers"]
        for one in trigger.get("instructions", [])
        if one["kind"] != "compute"
    )
    for rank, outcome in enumerate(outcomes):
        single = outcome[1][name][2]
        assert collections.Counter(text.removeprefix("shardplan::").split(" ")[0] for text in single) == planned, (
            f"rank {rank}"
        )
        assert "shardplan::all_gather (root)" in single, f"rank {rank}"


def test_collectives_are_inside_of_the_hooks_that_issue_them(plans, tmp_path):
    (default,) = (of for of in adapter_profiler.CASES if of.name == "default")
    for outcome in run_on_ranks(2, tmp_path / "ranks", adapter_profiler.nesting_of_a_step, default, plans["default"]):
        assert outcome[0] == "returned", outcome
        nested = set(outcome[1])
        assert ("FSDP::all_gather (layers.1)", "FSDP::pre_forward (layers.1)") in nested
        assert ("shardplan::all_gather layers.1", "FSDP::all_gather (layers.1)") in nested
        assert ("shardplan::reduce_scatter layers.1", "FSDP::post_backward_reduce (layers.1)") in nested
        assert ("FSDP::all_gather_copy_out (layers.1)", "FSDP::pre_backward (layers.1)") in nested
        assert ("FSDP::all_gather (layers.1)", "FSDP::backward_prefetch for layers.1") in nested
        assert ("FSDP::backward_prefetch for layers.1", "FSDP::pre_backward (layers.2)") in nested
        assert ("FSDP::post_backward_reduce (layers.1)", "") in nested
        assert ("FSDP::post_backward_reduce", "FSDP::root_post_backward_callback") in nested


def test_what_is_done_on_demand_has_a_range_of_its_own(plans, tmp_path):
    (default,) = (of for of in adapter_profiler.CASES if of.name == "default")
    for outcome in run_on_ranks(2, tmp_path / "ranks", adapter_profiler.ranges_on_demand, default, plans["default"]):
        assert outcome[0] == "returned", outcome
        fsdp, every = outcome[1]
        own = {name for name in every if name.startswith("shardplan::on_demand")}
        assert "shardplan::all_gather layers.0" in every
        assert "FSDP::all_gather (layers.0)" in fsdp and "FSDP::all_gather_copy_out (layers.0)" in fsdp
        assert own == {"shardplan::on_demand", *(f"shardplan::on_demand (layers.{i})" for i in range(3))}
