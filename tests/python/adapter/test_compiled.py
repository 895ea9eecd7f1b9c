# SPDX-License-Identifier: Apache-2.0
"""torch.compile under a plan does what it does under FSDP2: the same numbers, graphs, graph breaks and warnings."""

import compiled
import pytest
from adapter_workers import run_on_ranks
from conftest import plans_in


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch, plans_in(folder / "plans"):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        outcomes = run_on_ranks(2, folder / "ranks", compiled.run, str(folder / "searched"), timeout_s=300)
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None and outcome[0] == "returned", f"rank {rank}: {outcome}"
    return [outcome[1] for outcome in outcomes]


@pytest.mark.parametrize("name", compiled.NAMES)
def test_compiled_as_under_fsdp2(results, name):
    for result in results:
        ours, theirs = result[name]
        assert ours == theirs


@pytest.mark.parametrize("name", compiled.NAMES)
def test_equal_blocks_share_a_graph_and_steps_compile_nothing(results, name):
    for result in results:
        graphs = result[name][0]["graphs"]
        assert graphs[0] == graphs[-2], f"compiled again from step to step: {graphs}"
        if "whole" not in name:
            assert graphs[0] == 1
        assert not result[name][0]["warnings"]


def test_units_inside_a_whole_graph_say_what_to_do(results):
    for result in results:
        assert "compile each unit's module instead of the one around it, leave fullgraph out" in result["nested"]


def test_a_search_plans_what_compiled_blocks_do(results):
    """The first rank traces them; the first step compiles for real tensors what it would have compiled anyway."""
    for rank, result in enumerate(results):
        ours, traced, theirs = result["searched"]
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-6)
        assert traced == ([] if rank else ["aot_eager"] * 4)
        assert ours["graphs"][0] == ours["graphs"][-2] and not ours["breaks"] and not ours["warnings"]
