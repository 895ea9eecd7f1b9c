# SPDX-License-Identifier: Apache-2.0
"""Trains on two workers of Ray, under FSDP2, and by a plan with a failure on the way: train.py OUTPUT."""

import os
import sys

import loop
import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

WORKERS, STEPS, CHECKPOINT_EVERY, FAILS_BEFORE = 2, 6, 2, 5


def losses_of(output: str, name: str, plan: bool, fails_before: int | None) -> list[float]:
    result = TorchTrainer(
        loop.train,
        train_loop_config={
            "plan": plan, "steps": STEPS, "checkpoint_every": CHECKPOINT_EVERY, "fails_before": fails_before,
        },
        scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=torch.cuda.device_count() >= WORKERS),
        run_config=RunConfig(
            name=name, storage_path=output, failure_config=FailureConfig(max_failures=1 if fails_before else 0)
        ),
    ).fit()
    return result.metrics["losses"]


def main() -> int:
    output = os.path.abspath(sys.argv[1])
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False)
    else:
        ray.init(address="local", num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    by_fsdp2 = losses_of(output, "fsdp2", plan=False, fails_before=None)
    by_plan = losses_of(output, "plan", plan=True, fails_before=FAILS_BEFORE)
    same = len(by_plan) == STEPS and by_plan == by_fsdp2
    compared = "the same, digit for digit" if same else f"DIFFERENT, {by_plan} and {by_fsdp2}"
    print(
        f"{len(by_plan)} losses, by a plan with a failure before step {FAILS_BEFORE} and under FSDP2 without one: "
        f"{compared}"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
