# SPDX-License-Identifier: Apache-2.0
"""torchtitan's debug models train by plans as they do under its own FSDP2, with its own trainer: losses, norms,
gradients and parameters digit for digit, on the same meshes."""

import importlib.util
import pathlib
import sys
import types

import pytest
from conftest import ROOT

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(ROOT / "tests" / "python" / "adapter")]
import adapter_workers  # noqa: E402
import titan_ranks  # noqa: E402

MISSING = [name for name in ("torchtitan", "tyro", "typeguard") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

MODELS = {
    "llama3": ("llama3", "llama3_debugmodel"), "deepseek_v3": ("deepseek_v3", "deepseek_v3_debugmodel"),
    "qwen3": ("qwen3", "qwen3_moe_debug"), "gpt_oss": ("gpt_oss", "gpt_oss_debugmodel_flex"),
}
PARALLELISM = {
    "hsdp": ("data_parallel_replicate_degree", "2"), "tp": ("tensor_parallel_degree", "2"),
    "cp": ("context_parallel_degree", "2"), "ep": ("expert_parallel_degree", "2"),
    "local": ("spmd_backend", "partial_dtensor"),
}
MICRO_BATCHES = {"twice": 2, "thrice": 3}
# Two parameter groups in a block where experts have a mesh of their own.
CASES = [
    ("llama3", 2, ""), ("llama3", 4, "hsdp"), ("llama3", 4, "tp"), ("llama3", 4, "tp local"), ("llama3", 2, "cp"),
    ("deepseek_v3", 2, "ep"), ("qwen3", 4, "ep"), ("qwen3", 4, "ep local"), ("gpt_oss", 4, "ep"),
    ("llama3", 2, "twice"), ("llama3", 2, "thrice"), ("deepseek_v3", 4, "ep twice"),
]


@pytest.mark.parametrize("model, ranks, degrees", CASES, ids=lambda value: str(value).replace(" ", "_") or "fsdp")
def test_a_plan_trains_as_fsdp2_does(tmp_path, model, ranks, degrees):
    module, config = MODELS[model]
    words = ["--module", module, "--config", config]
    for degree in degrees.split():
        if degree in MICRO_BATCHES:
            batches = titan_ranks.BATCH * ranks * MICRO_BATCHES[degree]
            words += ["--training.global_batch_size", str(batches)]
            continue
        name, value = PARALLELISM[degree]
        words += [f"--parallelism.{name}", value]
    outcomes = adapter_workers.run_on_ranks(ranks, tmp_path / "ranks", titan_ranks.trained, words)
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None and outcome[0] == "returned", f"rank {rank}: {outcome}"
        ours, theirs = outcome[1]["plan"], outcome[1]["fsdp2"]
        planned = ours.pop("planned")
        assert len(ours["gradients"]) == titan_ranks.STEPS and ours["gradients"][0]
        for what in theirs:
            assert ours[what] == theirs[what], f"rank {rank}: {what}"
        assert planned["unplannable"] == "" and planned["deviation"] == "", planned
        apart = [group for group in planned["groups"] if group[1] > 0]
        assert bool(apart) == ("ep" in degrees.split()), planned["groups"]


def test_a_pipeline_is_refused():
    from shardplan.integrations import use_plans

    config = types.SimpleNamespace(
        model_spec=object(), parallelism=types.SimpleNamespace(pipeline_parallel_degree=2)
    )
    with pytest.raises(ValueError, match="pipeline parallelism is in no plan .*pipeline_parallel_degree 2"):
        use_plans(config)
