# SPDX-License-Identifier: Apache-2.0
"""For how many ranks a trace is planned: --ranks, --mesh and --cluster together, none of them left out silently."""

import json

import pytest
from conftest import ROOT

TRACE = ROOT / "tests" / "planner" / "goldens" / "traces" / "small.json"


def plan(shardplan, folder, *flags):
    result = shardplan("plan", TRACE, "-o", folder / "plan.json", *flags)
    made = json.loads((folder / "plan.json").read_text()) if result.returncode == 0 else None
    return result, made


@pytest.mark.parametrize(
    ("flags", "ranks", "says"),
    [
        ((), 8, "no --cluster, --ranks or --mesh is given: 8 x H100 SXM, 8 ranks"),
        (("--ranks", "24"), 24, "no --cluster is given: devices of 64 x H100 SXM, 24 ranks as --ranks says"),
        (("--mesh", "replicate=2", "shard=3"), 6, "devices of 8 x H100 SXM, 6 ranks as the mesh says"),
        (("--cluster", "h100_sxm_64"), 64, ""),
        (("--cluster", "h100_sxm_64", "--ranks", "16"), 16, "64 x H100 SXM has 64 ranks: 16 of its devices"),
        (("--cluster", "h100_sxm_8", "--mesh", "shard=8"), 8, ""),
        (
            ("--cluster", "h100_sxm_64", "--ranks", "16", "--mesh", "replicate=4", "shard=4"),
            16,
            "64 x H100 SXM has 64 ranks",
        ),
        (("--cluster", "h100_sxm_8", "--ranks", "4"), 4, "8 x H100 SXM has 8 ranks: 4 of its devices"),
        (("--cluster", "h100", "--ranks", "16"), 16, "64 x H100 SXM has 64 ranks: 16 of its devices, as --ranks says"),
        (("--cluster", "h100", "--ranks", "64"), 64, ""),
        (("--cluster", "h100_sxm", "--ranks", "65"), 65, "256 x H100 SXM has 256 ranks: 65 of its devices"),
        (("--cluster", "a100", "--ranks", "128"), 128, "64 x A100 SXM has 64 ranks: 128 of its devices"),
        (("--cluster", "a100_80gb", "--ranks", "512"), 512, ""),
        (
            ("--cluster", "h200", "--mesh", "replicate=2", "shard=3"),
            6,
            "8 x H200 SXM has 8 ranks: 6 of its devices, as the mesh says",
        ),
        (("--cluster", "gb200"), 72, "no --ranks or --mesh is given: 72 x GB200, 72 ranks"),
        (("--cluster", "h100_96_500w", "--ranks", "8"), 8, ""),
    ],
)
def test_ranks_are_what_the_user_says(shardplan, tmp_path, flags, ranks, says):
    result, made = plan(shardplan, tmp_path, *flags)
    assert result.returncode == 0, result.stderr
    assert made["world_size"] == made["cluster"]["ranks"] == ranks
    sizes = [dim["size"] for dim in made["mesh"]]
    product = 1
    for size in sizes:
        product *= size
    assert product == ranks
    assert (says in result.stderr) if says else ("its devices" not in result.stderr), result.stderr


@pytest.mark.parametrize("command", ("plan", "memory"))
@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (("--ranks", "4", "--mesh", "shard=8"), 2, "found --ranks 4, expected 8, the ranks of the mesh shard=8"),
        (("--cluster", "h100_sxm_8", "--mesh", "shard=4"), 3, "found 4 (shard=4), expected 8"),
        (("--cluster", "h100_sxm_8", "--ranks", "16"), 3, "16 ranks are several nodes of 8 x H100 SXM"),
        (("--ranks", "0"), 2, "--ranks"),
        (("--ranks", "eight"), 2, "--ranks"),
        (("--cluster", "h10"), 3, "h100_sxm_8"),
        (
            ("--cluster", "mi300", "--ranks", "8"),
            3,
            "a100_40gb_2023, a100_80, a100_80gb_2023, b200, gb200_nvl72, h100_80gb_2023, h100_96_500w, h100_sxm, h200",
        ),
        (("--cluster", "h100_sxm_64_1", "--ranks", "8"), 3, "h100_sxm_64_100g"),
    ],
)
def test_ranks_that_contradict_each_other_are_refused(shardplan, tmp_path, command, flags, code, says):
    output = ("-o", tmp_path / "plan.json") if command == "plan" else ()
    result = shardplan(command, TRACE, *output, *flags)
    assert result.returncode == code and says in result.stderr, result.stderr


def test_a_mesh_in_a_strategy_counts_as_one_on_the_command_line(shardplan, tmp_path):
    (tmp_path / "s.json").write_text(
        json.dumps({"schema": "shardplan.strategy/1", "policy": "fsdp2", "mesh": [{"name": "shard", "size": 6}]})
    )
    _, made = plan(shardplan, tmp_path, "--strategy", tmp_path / "s.json")
    assert made["world_size"] == 6
    result, _ = plan(shardplan, tmp_path, "--strategy", tmp_path / "s.json", "--ranks", "4")
    assert result.returncode == 2


def test_another_cluster_for_a_plan_has_the_plans_ranks(shardplan, tmp_path):
    plan(shardplan, tmp_path, "--ranks", "16")
    result = shardplan("simulate", tmp_path / "plan.json", "--cluster", "h100_sxm_64")
    assert result.returncode == 0 and "64 x H100 SXM has 64 ranks: 16 of its devices" in result.stderr
    node = shardplan("simulate", tmp_path / "plan.json", "--cluster", "h100_sxm_8")
    assert node.returncode == 3 and "no link between nodes" in node.stderr
    device = shardplan("simulate", tmp_path / "plan.json", "--cluster", "h200")
    assert device.returncode == 0 and "64 x H200 SXM has 64 ranks: 16 of its devices" in device.stderr
    assert "141" in shardplan("memory", tmp_path / "plan.json", "--cluster", "h200").stdout
    wrong = shardplan("memory", tmp_path / "plan.json", "--ranks", "4")
    assert wrong.returncode == 2 and "found --ranks 4, expected 16" in wrong.stderr
