# SPDX-License-Identifier: Apache-2.0
"""torchtitan's debug models train by plans as they do under its own FSDP2, with its own trainer: losses, norms,
gradients and parameters digit for digit, on the same meshes."""

import importlib.util
import os
import pathlib
import sys
import types

import pytest
from conftest import ROOT

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(ROOT / "tests" / "python" / "adapter")]
import adapter_workers  # noqa: E402
import titan_ranks  # noqa: E402
import warm  # noqa: E402

MISSING = [name for name in ("torchtitan", "tyro", "typeguard") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

MODELS = {
    "llama3": ("llama3", "llama3_debugmodel"), "deepseek_v3": ("deepseek_v3", "deepseek_v3_debugmodel"),
    "qwen3": ("qwen3", "qwen3_moe_debug"), "gpt_oss": ("gpt_oss", "gpt_oss_debugmodel_flex"),
}
PARALLELISM = {
    "hsdp": ("data_parallel_replicate_degree", "2"), "tp": ("tensor_parallel_degree", "2"),
    "tp4": ("tensor_parallel_degree", "4"),
    "cp": ("context_parallel_degree", "2"), "ep": ("expert_parallel_degree", "2"),
    "local": ("spmd_backend", "partial_dtensor"),
}
MICRO_BATCHES = {"twice": 2, "thrice": 3}
# Two parameter groups in a block where experts have a mesh of their own.
CASES = [
    ("llama3", 2, ""), ("llama3", 4, "hsdp"), ("llama3", 4, "tp"), ("llama3", 4, "tp local"), ("llama3", 2, "cp"),
    ("deepseek_v3", 2, "ep"), ("qwen3", 4, "ep"), ("qwen3", 4, "ep local"), ("gpt_oss", 4, "ep"),
    ("llama3", 2, "twice"), ("llama3", 2, "thrice"), ("deepseek_v3", 4, "ep twice"),
    ("deepseek_v3", 4, "tp4 ep"),
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


# Data loading need not be installed. The second: a plan that no rank can apply.
STARTED = """
import os, runpy, sys
from shardplan.titan import absent
absent.stand_in()
if "REFUSED" in os.environ:
    import shardplan.torch as sp, torchtitan.train
    def main():
        raise sp.PlanError("shardplan: no mesh has that")
    torchtitan.train.main = main
runpy.run_module("shardplan.integrations.torchtitan", run_name="__main__", alter_sys=True)
"""
DEBUG = ("--module", "llama3", "--config", "llama3_debugmodel", "--training.disable_cuda_graphs")


def started(*words, **environment):
    return warm.run(["-c", STARTED, *words], cwd=ROOT, env={**os.environ, **environment}, timeout=300)


@pytest.mark.parametrize(
    "words, code, said",
    [
        ((), 2, "--module and --config are required"),
        (("--help",), 0, "torchtitan's trainer by plans"),
        (("--module", "llama3", "--config", "nothing"), 3, "Config function 'nothing' not found"),
        (("--module", "llama5", "--config", "nothing"), 3, "Cannot import module 'llama5'"),
        ((*DEBUG, "--parallelism.pipeline_parallel_degree", "2"), 3, "pipeline parallelism is in no plan"),
        ((*DEBUG, "--parallelism.nothing", "2"), 2, "Unrecognized options"),
    ],
)
def test_what_the_command_refuses_ends_without_a_traceback(words, code, said):
    done = started(*words)
    assert done.returncode == code and said in done.stdout + done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "RuntimeWarning" not in done.stderr


def test_a_plan_that_no_rank_applies_is_told_once():
    first, second = (started(*DEBUG, REFUSED="1", RANK=rank) for rank in ("0", "1"))
    assert first.returncode == second.returncode == 3
    assert first.stderr.splitlines()[-1] == "shardplan.integrations.torchtitan: no mesh has that"
    assert "Traceback" not in first.stderr and "no mesh" not in second.stderr
