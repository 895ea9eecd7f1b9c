# SPDX-License-Identifier: Apache-2.0
"""The peak of memory that `shardplan run` measures, of real allocations, is the one that `shardplan simulate` says: on
the CPU, and by PyTorch's own caching allocator on the device in software (docs/internals/device.md)."""

import json
import re

import pytest
from conftest import ROOT, build_folder, on_device

TRACES = ROOT / "tests" / "planner" / "goldens" / "traces"
LAYERS = {"units": [{"modules": ["layers.*"]}, {"modules": [""]}]}
BF16 = {"mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}


def micro(number: int) -> list[dict]:
    return [{"call": "forward", "microbatch": number}, {"call": "backward", "microbatches": [number]}]


END = [{"call": "optimizer_step"}, {"call": "zero_grad"}]
ACCUMULATING = {"program": [[*micro(0), *micro(1), *END]]}
KEEPING = {
    "program": [
        [
            {"call": "module", "method": "set_requires_gradient_sync", "module": "", "value": False},
            *micro(0),
            {"call": "module", "method": "set_requires_gradient_sync", "module": "", "value": True},
            *micro(1),
            *END,
        ]
    ]
}

# By name: trace, strategy.
CASES = {
    "fsdp2": ("small", {"policy": "fsdp2", **LAYERS}),
    "fsdp2 bf16, accumulating": ("small", {"policy": "fsdp2", **LAYERS, **BF16, **ACCUMULATING}),
    "fsdp2 keeping gradients": ("tied", {"policy": "fsdp2", **LAYERS, **KEEPING, "reshard_after_forward": False}),
    "fsdp2 offloaded": ("small", {"policy": "fsdp2", **LAYERS, "cpu_offload": True}),
    "fsdp2 reduced in bf16": ("reused", {"policy": "fsdp2", **LAYERS, "mixed_precision": {"reduce_dtype": "bfloat16"}}),
    "fsdp1": ("small", {"policy": "fsdp1", **LAYERS}),
    "fsdp1 bf16, accumulating": ("small", {"policy": "fsdp1", **LAYERS, **BF16, **ACCUMULATING}),
    "fsdp1 keeping gradients": ("reused", {"policy": "fsdp1", **LAYERS, **KEEPING, "fsdp1": {"use_orig_params": True}}),
}


@pytest.fixture(scope="module")
def plan_and_report(shardplan, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    made: dict[tuple, tuple] = {}

    def make(name: str, ranks: int) -> tuple:
        if (name, ranks) not in made:
            cluster = json.loads((ROOT / "examples" / "train_gpt" / "cluster.json").read_text())
            cluster["ranks"] = cluster["ranks_per_node"] = ranks
            (folder / "cluster.json").write_text(json.dumps(cluster))
            trace, strategy = CASES[name]
            stem = re.sub(r"\W+", "_", f"{name} {ranks}")
            document, plan, report = (folder / f"{stem}.{kind}.json" for kind in ("strategy", "plan", "report"))
            document.write_text(json.dumps({"schema": "shardplan.strategy/1", **strategy}))
            planned = shardplan(
                "plan", TRACES / f"{trace}.json", "--cluster", folder / "cluster.json", "--strategy", document, "-q",
                "-o", plan,
            )
            assert planned.returncode == 0, planned.stderr
            assert shardplan("simulate", plan, "--report", report).returncode == 0
            made[name, ranks] = plan, report
        return made[name, ranks]

    return make


def peaks(text: str) -> tuple[str, str]:
    """Measured, simulated."""
    (found,) = re.findall(r"^peak memory in bytes +(\d+) +(\d+)$", text, re.MULTILINE)
    return found


@pytest.mark.parametrize(("name", "ranks"), [(name, 1 + i % 2) for i, name in enumerate(CASES)])
def test_the_measured_peak_is_the_simulated_one_on_the_cpu(plan_and_report, shardplan, name, ranks):
    plan, report = plan_and_report(name, ranks)
    run = shardplan(
        "run", plan, "--ranks", ranks, "--device", "cpu", "--compute-scale", 0, "--steps", 3, "--report", report
    )
    assert run.returncode == 0, run.stderr
    measured, simulated = peaks(run.stdout)
    assert measured == simulated


@pytest.mark.parametrize("name", CASES)
def test_the_measured_peak_is_the_simulated_one_by_the_caching_allocator(plan_and_report, name):
    plan, report = plan_and_report(name, 2)
    run = on_device(
        [
            str(build_folder() / "bin" / "shardplan-run"), str(plan), "--ranks", "2", "--device", "cuda",
            "--compute-scale", "0", "--steps", "3", "--report", str(report),
        ],
        "null",
    )
    assert run.returncode == 0, run.stderr
    measured, simulated = peaks(run.stdout)
    assert measured == simulated
