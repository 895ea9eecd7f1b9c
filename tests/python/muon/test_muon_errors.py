# SPDX-License-Identifier: Apache-2.0
"""Errors of sp.Muon name the parameter, and say what was expected."""

import muon_errors
import pytest
from adapter_workers import run_on_ranks

OF_STATE = "ValueError: shardplan: parameter layer0.wide: momentum_buffer of the state expected"
SAID = {
    "no plan": "PlanError: Muon follows a plan, which says who owns each matrix",
    "no sharded parameters": "PlanError: the model has no sharded parameters: call fully_shard",
    "no matrices": "PlanError: the plan has no matrices for Muon: trace the model with `--muon RANKS`, and plan with",
    "not in the model": "PlanError: parameter layer0.long: expected by the plan, not in the model",
    "shape": "PlanError: parameter layer0.tall (exchange muon.0): shape expected [192, 32], found [192, 64]",
    "vector": "PlanError: parameter layer0.scale: its shape is [8], and Muon steps matrices",
    "owner": "PlanError: parameter layer0.tall (exchange muon.0): its owner is rank 2 of the 2 ranks that exchange",
    "some owners": "PlanError: exchange muon.0: some of its matrices have an owner, and some have none",
    "columns": "PlanError: parameter layer0.wide (exchange muon.0): placements expected Shard(0) over 2 ranks, found",
    "no row": "PlanError: parameter layer1.few: rows 24 to 48 in no matrix of the exchanges",
    "two rows": "PlanError: parameter layer1.few: row 20 in two matrices of the exchanges",
    "not exchanged": "PlanError: parameter layer0.wide: Muon steps it, and no instruction of the optimizer's step does",
    "other params": "ValueError: shardplan: Muon does not step parameter layer0.scale, of shape [8], in the plan",
    "less params": "ValueError: shardplan: Muon steps parameter layer0.wide in the plan, and it is in none of",
    "groups of the state": "ValueError: shardplan: groups of the state have [3, 3] parameters, those of this Muon [6]; "
    "the first difference is in group 0, here of layer0.wide to layer1.gate",
    "another group": "ValueError: shardplan: Muon does not step parameter layer0.scale, of shape [8], in the plan",
    "behind it": "nothing",
    "shape of the state": f"{OF_STATE} [64, 192] in Shard(0) over 2 ranks, found [3, 3], a whole",
    "another order": f"{OF_STATE} [64, 192] in Shard(0) over 2 ranks, found [",
    "copied": "TypeError: shardplan: sp.Muon belongs to its model and plan, and is neither copied nor pickled",
    "pickled": "TypeError: shardplan: sp.Muon belongs to its model and plan, and is neither copied nor pickled",
    "taken out": "ValueError: shardplan: Muon steps parameter layer0.wide in the plan, and it is in none of",
    "arguments": "ValueError: Adjust learning rate function cosine is not supported",
    "gradient": "RuntimeError: shardplan: parameter layer0.tall: its gradient is not sharded as the parameter is",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_on_ranks(2, tmp_path_factory.mktemp("errors"), muon_errors.run, 2)


@pytest.mark.parametrize("name", SAID)
def test_is_refused(outcomes, name):
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None and outcome[0] == "returned", f"rank {rank}: {outcome}"
        assert outcome[1][name].startswith(SAID[name]), f"rank {rank}: {outcome[1][name]}"
        assert outcome[1].keys() == SAID.keys()
