# SPDX-License-Identifier: Apache-2.0
"""sp.Muon in a training: groups, schedulers, states, checkpoints, ties, and next to torch.optim.Muon on FSDP2."""

import muon_features
import pytest
from adapter_workers import run_on_ranks
from conftest import build_folder

NAMES = [feature.__name__ for feature in muon_features.FEATURES]


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(build_folder() / "bin"), prepend=":")
        patch.setenv("SHARDPLAN_BUILD", str(build_folder()))
        return run_on_ranks(request.param, tmp_path_factory.mktemp("features"), muon_features.run, request.param)


@pytest.mark.parametrize("name", NAMES)
def test_feature(outcomes, name):
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None and outcome[0] == "returned", f"rank {rank}: {outcome}"
        assert outcome[1][name] == "", f"rank {rank}: {outcome[1][name]}"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_checkpoint_of_four_ranks_is_resumed(ranks, tmp_path):
    folder = str(tmp_path / "checkpoint")
    saved = run_on_ranks(4, tmp_path / "saving", muon_features.save, 4, folder, 2)
    assert saved == [("returned", None)] * 4
    resumed = run_on_ranks(ranks, tmp_path / "resuming", muon_features.resume, ranks, folder, 2, 4)
    assert resumed == [("returned", "")] * ranks
