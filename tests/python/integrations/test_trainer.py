# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer and accelerate train by plans as they do under FSDP2: losses, gradient norms, evaluation,
prediction, checkpoints, resuming."""

import pathlib
import sys

import pytest
from conftest import ROOT, plans_in

sys.path.insert(0, str(ROOT / "tests" / "python" / "adapter"))
import adapter_workers  # noqa: E402
import trainer_ranks  # noqa: E402
import warm  # noqa: E402

warm.IMPORTED += ["accelerate", "transformers.trainer"]


def on_two_ranks(folder: pathlib.Path, function, *arguments) -> list[dict]:
    with plans_in(folder / "plans"):
        outcomes = adapter_workers.run_on_ranks(2, folder, function, *arguments)
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None and outcome[0] == "returned", f"rank {rank}: {outcome}"
    return [outcome[1] for outcome in outcomes]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """accumulate -> (by plans, by FSDP2), each by rank."""
    made = {}

    def of(accumulate: int):
        if accumulate not in made:
            folder = tmp_path_factory.mktemp(f"trainer{accumulate}")
            made[accumulate] = (
                folder,
                *(
                    on_two_ranks(
                        folder / f"ranks{by_plans}", trainer_ranks.trainer, str(folder / f"out{by_plans}"), by_plans,
                        False, accumulate,
                    )
                    for by_plans in (True, False)
                ),
            )
        return made[accumulate]

    return of


@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_norms_and_evaluation_are_fsdp2s(trained, accumulate):
    _, ours, theirs = trained(accumulate)
    for rank in range(2):
        assert len(ours[rank]["losses"]) == 6 and len(ours[rank]["eval"]) == 2
        for what in ("losses", "eval", "norms"):
            assert ours[rank][what] == pytest.approx(theirs[rank][what], rel=0 if accumulate == 1 else 1e-4), what
        assert ours[rank]["predicted"] == pytest.approx(theirs[rank]["predicted"], rel=0 if accumulate == 1 else 1e-4)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_are_planned(trained, accumulate):
    _, ours, _ = trained(accumulate)
    assert all(result["deviates"] == "" and result["units"] == 6 for result in ours), ours


def test_a_run_resumes_from_its_checkpoint(trained, tmp_path):
    folder, ours, _ = trained(1)
    again = on_two_ranks(tmp_path / "resumed", trainer_ranks.trainer, str(folder / "outTrue"), True, True, 1)
    assert [r["losses"][3:] for r in again] == [r["losses"][3:] for r in ours]


def test_a_saved_model_loads_whole(trained):
    import torch
    from transformers import LlamaForCausalLM

    folder, _, _ = trained(1)
    ours, theirs = (
        LlamaForCausalLM.from_pretrained(folder / f"out{by_plans}" / "saved").state_dict() for by_plans in (True, False)
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    names = [
        sorted(p.name for p in (folder / f"out{by_plans}" / "checkpoint-3").iterdir()) for by_plans in (True, False)
    ]
    assert names[0] == names[1]


def test_a_loop_of_accelerate(tmp_path):
    ours, theirs = (on_two_ranks(tmp_path / str(by_plans), trainer_ranks.loop, by_plans) for by_plans in (True, False))
    assert [r["losses"] for r in ours] == [pytest.approx(r["losses"], rel=1e-5) for r in theirs]


def test_without_fsdp2_it_is_refused():
    from shardplan.integrations import use_plans

    with pytest.raises(ValueError, match="does not shard with it: a Trainer is given TrainingArguments"):
        use_plans(object())
