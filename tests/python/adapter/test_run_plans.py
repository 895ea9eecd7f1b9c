# SPDX-License-Identifier: Apache-2.0
"""`shardplan run` replays what `shardplan plan` makes of a traced model, under both policies: real memory and
collectives on two CPU ranks, and the adversarial order of the virtual machine."""

import pytest
from conftest import build_folder
from equivalence import Case
from equivalence_plans import make_plans
from equivalence_settings import CASES as FSDP2_CASES
from flat_settings import CASES as FSDP1_CASES

FSDP2 = [
    "default", "bf16", "accumulate_without_communication", "keep_after_forward", "offload_activations",
    "offload_activations_every_2",
]
FSDP1 = ["default", "default_orig", "zero2_bf16", "no_shard_bf16", "no_sync_bf16", "frozen", "hybrid_orig"]


def _cases() -> list[Case]:
    """Names say the policy; four ranks become two replicas of two in the virtual machine only."""
    chosen = {f"fsdp2_{case.name}": case for case in FSDP2_CASES if case.name in FSDP2}
    chosen |= {f"fsdp1_{case.name}": case for case in FSDP1_CASES if case.name in FSDP1}
    fields = ("model", "arguments", "strategy", "ranks")
    return [Case(name, **{field: getattr(case, field) for field in fields}) for name, case in chosen.items()]


CASES = _cases()


@pytest.fixture(scope="module")
def run_plans(tmp_path_factory) -> dict[str, str]:
    return make_plans(CASES, tmp_path_factory.mktemp("run_plans"), build_folder())


@pytest.mark.parametrize("case", [c for c in CASES if c.ranks == 2], ids=lambda case: case.name)
def test_runs_on_cpu_ranks(shardplan, run_plans, case, tmp_path):
    plan, report = run_plans[case.name], tmp_path / "report.json"
    assert shardplan("simulate", plan, "--report", report).returncode == 0
    result = shardplan(
        *("run", plan, "--ranks", "2", "--device", "cpu", "--compute-scale", "0", "--steps", "2", "--report", report)
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "measured" in result.stdout


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_runs_in_an_adversarial_order(shardplan, run_plans, case):
    result = shardplan("run", run_plans[case.name], "--device", "virtual", "--seed", "1", "--steps", "2")
    assert result.returncode == 0, result.stdout + result.stderr
