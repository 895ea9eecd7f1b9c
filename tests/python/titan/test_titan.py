# SPDX-License-Identifier: Apache-2.0
"""`shardplan torchtitan`: units, meshes and settings are those that torchtitan's own parallelize makes with PyTorch's
fully_shard; what a plan does not have ends with its name."""

import csv
import functools
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import warm
from conftest import ROOT, build_folder

HERE = pathlib.Path(__file__).parent
TRACER = ROOT / "tests" / "python" / "tracer"
sys.path.insert(0, str(TRACER))

from test_tracer_sharding import compare, real  # noqa: E402

# Without typeguard tyro, which parses torchtitan's arguments, cannot be imported.
MISSING = [name for name in ("torchtitan", "tyro", "typeguard") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

COMMAND = """
from shardplan.command import run
from shardplan.titan.cli import main

run("shardplan torchtitan", main)
"""
SMALL = ("--training.seq_len", "512", "--training.local_batch_size", "2")
MODELS = {
    "llama3": ("--module", "llama3", "--config", "llama3_debugmodel", *SMALL),
    "deepseek_v3": ("--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel", *SMALL),
    "qwen3": ("--module", "qwen3", "--config", "qwen3_moe_debug", *SMALL),
    "gpt_oss": ("--module", "gpt_oss", "--config", "gpt_oss_debugmodel_flex", *SMALL),
}
DEGREES = {
    "tp": "--parallelism.tensor_parallel_degree", "cp": "--parallelism.context_parallel_degree",
    "ep": "--parallelism.expert_parallel_degree", "hsdp": "--parallelism.data_parallel_replicate_degree",
}
CASES = [
    ("llama3", "", "spmd_types"), ("llama3", "hsdp2", "spmd_types"), ("llama3", "tp2", "partial_dtensor"),
    ("llama3", "tp8", "spmd_types"), ("llama3", "cp2_tp2", "spmd_types"), ("deepseek_v3", "ep4", "spmd_types"),
    ("deepseek_v3", "ep4_tp2", "partial_dtensor"), ("deepseek_v3", "ep4_hsdp2", "spmd_types"),
    ("deepseek_v3", "ep4_tp2", "spmd_types"), ("deepseek_v3", "ep2_tp4", "spmd_types"),
    ("deepseek_v3", "ep2_tp4", "partial_dtensor"),
    ("qwen3", "ep2_cp2", "spmd_types"), ("qwen3", "ep2_tp2", "spmd_types"),
    ("gpt_oss", "ep2", "spmd_types"),
    ("gpt_oss", "ep8", "partial_dtensor"),
]


def words_of(model, degrees="", backend="spmd_types"):
    words = [*MODELS[model], "--parallelism.spmd_backend", backend]
    words += ["--training.disable_cuda_graphs"] if model != "llama3" else []
    for word in degrees.split("_") if degrees else ():
        words += [DEGREES[word.rstrip("0123456789")], word.lstrip("abcdefghijklmnopqrstuvwxyz")]
    return words


def run(*words, cwd=ROOT):
    environment = {"SHARDPLAN_PROGRAMS": str(build_folder() / "bin"), **os.environ}
    return warm.run(["-c", COMMAND, *words], cwd=cwd, env=environment, timeout=900)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("titan")

    @functools.cache
    def of(*words):
        """Printed text, plan, strategy, trace, the folder of these."""
        own = folder / str(len(list(folder.iterdir())))
        done = run("--cluster", "h100_sxm_8", "-q", "-o", own, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        documents = (json.loads((own / f"{name}.json").read_text()) for name in ("plan", "strategy", "trace"))
        return done.stdout, *documents, own

    return of


@functools.cache
def torchtitans(*words):
    """The units that torchtitan makes."""
    return real("--torchtitan", "8", *words)


@pytest.mark.parametrize("model, degrees, backend", CASES)
def test_units_are_those_that_torchtitan_makes(model, degrees, backend, planned):
    words = words_of(model, degrees, backend)
    _, plan, strategy, _, _ = planned(*words)
    compare(plan, strategy, torchtitans(*words))


# Experts' ranks are the others', in process groups of their own: the file is refused.
@pytest.mark.parametrize("model, degrees, backend", [case for case in CASES if case[1] != "ep2_tp2"])
def test_the_exported_file_makes_torchtitans_units(model, degrees, backend, planned, shardplan):
    """Groups, their parameters, meshes and placements, divisors, prefetch lists."""
    words = words_of(model, degrees, backend)
    *_, folder = planned(*words)
    done = shardplan("export", folder / "plan.json", "--fsdp2", "--trace", folder / "trace.json", "-q", "-o",
                     folder / "apply_plan.py")
    assert done.returncode == 0 and "instruction for instruction" in done.stdout, done.stdout + done.stderr
    assert real("--exported", folder, "8", *words) == torchtitans(*words)


@pytest.mark.parametrize(
    "model, degrees, backend",
    [("llama3", "hsdp2", "spmd_types"), ("llama3", "tp2", "partial_dtensor"), ("deepseek_v3", "ep4", "spmd_types")],
)
def test_steps_under_the_exported_file_are_the_plans_event_for_event(model, degrees, backend, planned, shardplan):
    """torchtitan's loss calls the setters of the program itself."""
    words = words_of(model, degrees, backend)
    *_, folder = planned(*words)
    assert shardplan("export", folder / "plan.json", "--fsdp2", "-q", "-o", folder / "apply_plan.py").returncode == 0
    paths = os.pathsep.join(map(str, (ROOT / "tools" / "python", TRACER, TRACER.parent)))
    done = warm.run([HERE / "exported_steps.py", folder, "8", *words], cwd=HERE, timeout=900,
                    env={**os.environ, "PYTHONPATH": paths + os.pathsep + os.environ.get("PYTHONPATH", "")})
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("trace", "strategy"):
        shutil.copy(folder / f"{name}.json", folder / f"titan.{name}.json")
    compared = subprocess.run(
        [build_folder() / "bin" / "shardplan-conformance", folder, "titan"], capture_output=True, text=True, check=False
    )
    assert compared.returncode == 0 and "titan: matches" in compared.stdout, compared.stdout + compared.stderr


def test_experts_of_ep_over_tp_are_cut_along_both(planned):
    _, plan, strategy, trace, _ = planned(*words_of("deepseek_v3", "ep4_tp2", "partial_dtensor"))
    assert [(dim["name"], dim["size"]) for dim in strategy["mesh"]] == [("efsdp", 2), ("ep_1", 2), ("tp", 2)]
    assert strategy["data_parallel"] == {"shard": ["efsdp", "ep_1"]}
    experts = next(p for p in trace["parameters"] if p["fqn"].endswith("inner_experts.w1_EFD"))
    assert [(p["mesh_dim"], p["size"], p["dim"]) for p in experts["placements"]] == [("ep_1", 2, 0), ("tp", 2, 0)]
    assert any(entry["name"] == "ep" and entry["size"] == 4 for entry in plan["communicators"])


def test_a_replicated_gradient_is_one_sum_over_a_tp_that_ep_divides(planned):
    _, plan, strategy, trace, _ = planned(*words_of("deepseek_v3", "ep2_tp4"))
    assert [(dim["name"], dim["size"]) for dim in strategy["mesh"]] == [("dp_shard", 2), ("tp_1", 2), ("ep", 2)]
    norm = next(p for p in trace["parameters"] if p["fqn"] == "layers.0.attention_norm.weight")
    assert norm["placements"] == [{"mesh_dim": "tp", "size": 4, "grad_partial": True}]
    over = [
        i["communicator"] for trigger in plan["steps"][-1]["triggers"] for i in trigger["instructions"]
        if i["kind"] == "all_reduce" and i.get("unit") == "layers.0"
    ]
    assert over and set(over) == {"tp"}


def test_what_is_printed(planned):
    printed, plan, strategy, _, folder = planned(*words_of("llama3"))
    assert printed.startswith("torchtitan llama3 debugmodel, 8 ranks (dp_shard 8), 2 x 512 tokens\n")
    for line in ("step  ", "tokens/s per GPU", "reserved", "fits", "tokens/s of the job: "):
        assert line in printed
    assert plan["world_size"] == 8 and strategy["optimizer"] == {"kind": "adamw", "implementation": "fused"}
    report = json.loads((folder / "report.json").read_text())
    rate = 8 * 2 * 512 * 10**9 // report["step_ns"]
    assert f"tokens/s of the job: {rate:,}\n" in printed


def test_selective_checkpointing_is_that_of_the_release(planned):
    _, _, strategy, trace, _ = planned(*words_of("llama3"))
    rule = strategy["checkpoint"]
    assert rule["early_stop"] is False and rule["modules"] == [f"layers.{i}" for i in range(6)]
    every = {entry["name"]: entry.get("recompute_every", 0) for entry in rule["save"]}
    assert every["aten.mm"] == every["aten.linear"] == 2 and every["flex_attention"] == 0
    text = (ROOT / "planner" / "src" / "frameworks.cc").read_text()
    in_cpp = {line.split('"')[1] for line in text.splitlines() if '{"' in line}
    assert every.keys() <= in_cpp
    optional = ("deepep", "hybridep")  # operators of libraries that are not installed
    assert {name for name in in_cpp - every.keys() if not name.startswith(optional)} == set()
    assert not any("_checkpoint" in module["fqn"] for module in trace["modules"])


def test_a_router_that_is_run_again_keeps_its_checkpoints_in_the_model(planned):
    """torchtitan's policy looks at the shape of a router's product."""
    _, _, strategy, trace, _ = planned(*words_of("deepseek_v3", "ep4"))
    assert "checkpoint" not in strategy
    assert any(event[0] == "recompute_enter" for entry in trace["backwards"] for event in entry["events"])


def test_a_chunked_loss_keeps_the_head_unsharded(planned):
    _, plan, strategy, _, _ = planned(*words_of("llama3"))
    methods = [call["method"] for call in strategy["program"][0] if call["call"] == "module"]
    assert methods[:4] == [
        "set_reshard_after_forward", "set_reshard_after_backward", "set_requires_gradient_sync", "unshard",
    ]
    kinds = [
        i["kind"] for trigger in plan["steps"][-1]["triggers"] for i in trigger["instructions"]
        if i.get("unit") == "norm,lm_head"
    ]
    assert kinds.count("reduce_scatter") == 2  # the head's and the norm's gradients


def test_micro_batches_are_the_global_batch(planned):
    printed, _, strategy, _, _ = planned(*words_of("llama3"), "--training.global_batch_size", "32")
    assert "2 micro-batches" in printed
    calls = strategy["program"][0]
    assert {call.get("microbatch", 0) for call in calls if call["call"] == "forward"} == {0, 1}
    assert [call["call"] for call in calls[-2:]] == ["optimizer_step", "zero_grad"]


def test_compile_and_full_checkpointing_are_the_strategys(planned):
    _, _, strategy, _, _ = planned(*words_of("llama3"), "--compile.enable", "activation_checkpoint:full")
    assert strategy["compile"] is True and "save" not in strategy["checkpoint"]


@pytest.mark.parametrize(
    "words, code, said",
    [
        (("--module", "llama3"), 2, "--config is required"),
        (("--module", "llama3", "--config", "llama3_9b"), 3, "Config function 'llama3_9b' not found"),
        (("--module", "llama5", "--config", "llama3_8b"), 3, "Cannot import module 'llama5'"),
        (("--module", "llama3", "--config", "model_registry"), 3, "missing 1 required positional argument: 'flavor'"),
        ((*MODELS["llama3"], "--cluster", "nothing"), 3, "no such cluster"),
        ((*MODELS["llama3"], "--parallelism.tensor_paralel_degree", "2"), 2, "Unrecognized options"),
        (
            (*MODELS["llama3"], "--parallelism.pipeline_parallel_degree", "2", "--training.disable_cuda_graphs"), 3,
            "pipeline parallelism is in no plan",
        ),
        ((*MODELS["llama3"], "--parallelism.spmd_backend", "full_dtensor"), 3, "full_dtensor is not traced"),
        ((*MODELS["llama3"], "--parallelism.tensor_parallel_degree", "3"), 3, "Invalid parallel dims"),
        ((*MODELS["llama3"], "--parallelism.tensor_parallel_degree", "16"), 3, "16 together, and the job has 8 ranks"),
        ((*MODELS["llama3"][:4], "--training.local_batch_size", "0"), 3, "training.local_batch_size is 0"),
        ((*MODELS["llama3"], "--routing", "nosuch.json"), 3, "--routing nosuch.json: cannot read it"),
        ((*MODELS["llama3"], "--optimizer.implementation", "fused_opt_states_bf16"), 3, "fused_opt_states_bf16"),
    ],
)
def test_errors(words, code, said, tmp_path):
    done = run("-q", *words, cwd=tmp_path)
    assert done.returncode == code and said in done.stdout + done.stderr, done.stderr
    assert "Traceback" not in done.stderr and (code != 3 or len(done.stderr.splitlines()) == 1)


def test_an_attention_whose_batch_is_read_is_planned(planned):
    """varlen: the builder is called twice, on fake tensors and on such with values."""
    printed, _, strategy, _, _ = planned("--module", "llama3", "--config", "llama3_debugmodel_varlen_attn", *SMALL)
    assert "tokens/s of the job: " in printed
    modules = [fqn for rule in strategy["units"] for fqn in rule["modules"]]
    assert sorted(modules) == sorted(["", "tok_embeddings", *(f"layers.{i}" for i in range(6)), "norm", "lm_head"])


def test_dist_muon_is_the_jobs(planned):
    """The layouts and buckets of torchtitan's own configuration: the dense first layer alone, then pairs of layers."""
    printed, plan, strategy, trace, _ = planned("--module", "kimi_k2_7", "--config", "kimi_k2_5_debugmodel")
    assert "tokens/s of the job: " in printed
    muon = strategy["optimizer"]["muon"]
    assert strategy["optimizer"]["kind"] == "adamw" and muon["dist_muon"] is True
    layers = [sorted({int(fqn.split(".")[1]) for fqn in bucket}) for bucket in muon["buckets"]]
    assert layers == [[0], [1, 2], [3, 4], [5]]
    assert sorted(fqn for bucket in muon["buckets"] for fqn in bucket) == sorted(muon["matrices"])
    shapes = {entry["fqn"]: entry["shape"] for entry in trace["parameters"]}
    assert all(len(shapes[fqn]) >= 2 and "norm" not in fqn and "lm_head" not in fqn for fqn in muon["matrices"])
    of_heads = {
        fqn: rule["block_rows"] for rule in muon["compute"] if "block_rows" in rule for fqn in rule["parameters"]
    }
    assert {fqn.split(".")[3] for fqn in of_heads} == {"wq", "wkv_b"}
    assert [exchange["dtype"] for exchange in plan["exchanges"]] == ["float32"] * 4
    counts: dict[str, int] = {}
    for exchange in plan["exchanges"]:
        for matrix in exchange["matrices"]:
            unit = next(unit for unit in plan["units"] if unit["fqn"] == matrix["unit"])
            fqn = unit["parameters"][matrix["parameter"]]["fqn"]
            counts[fqn] = counts.get(fqn, 0) + 1
    for fqn, count in counts.items():
        stack = shapes[fqn][0] if len(shapes[fqn]) == 3 else shapes[fqn][0] // of_heads.get(fqn, shapes[fqn][0])
        assert count == stack, fqn


def test_dist_muon_beside_expert_parallelism(planned):
    """Experts are on a mesh of their own. Their matrices have owners there, the dense ones among all ranks."""
    words = ("--module", "kimi_k2_7", "--config", "kimi_k2_5_debugmodel", DEGREES["ep"], "2")
    _, plan, _, _, _ = planned(*words)
    sizes = {group["name"]: group["size"] for group in plan["communicators"]}
    units = {unit["fqn"]: unit["parameters"] for unit in plan["units"]}
    found = {
        (sizes[exchange["communicator"]], "routed_experts" in units[matrix["unit"]][matrix["parameter"]]["fqn"])
        for exchange in plan["exchanges"]
        for matrix in exchange["matrices"]
    }
    assert found == {(8, False), (4, True)}


@pytest.mark.parametrize(
    "change, said",
    [
        ("del own['compute_sharding_by_fqn']['layers.0.attention.wo.weight']", "does not say where it is whole"),
        ("own['bucket_configs'] = own['bucket_configs'][1:]", "layers.0.attention.wq.weight, which is in no bucket"),
        (
            "own['compute_sharding_by_fqn']['layers.0.attention.wo.weight'] = ComputeLayout({'dp_shard': Shard(1)})",
            "no words for the compute layout of layers.0.attention.wo.weight (dp_shard Shard(dim=1))",
        ),
        ("groups[0].optimizer_kwargs['ns_steps'] = 4; groups.insert(0, ParamGroupConfig(pattern='wo', "
         "optimizer_name='DistMuon', optimizer_kwargs={}))", "groups of DistMuon have different ns_steps: [5, 4]"),
    ],
)  # fmt: skip
def test_what_a_strategy_cannot_say_of_dist_muon(change, said):
    script = f"""
from shardplan.titan import absent
absent.stand_in()
from torch.distributed.tensor import Shard
from torchtitan.components.optimizer.optimizer import ParamGroupConfig
from torchtitan.distributed.flex_shard import ComputeLayout
from torchtitan.models.kimi_k2_7.config_registry import kimi_k2_5_debugmodel
from shardplan.titan import muon
from shardplan.tracer.errors import TracerError
config = kimi_k2_5_debugmodel().optimizer
groups, own = config.param_groups, config.optimizer_factory_kwargs_by_name["DistMuon"]
fqns = list(own["compute_sharding_by_fqn"])
{change}
try:
    muon.field(config, muon.stepped_by(groups, fqns)["DistMuon"])
except TracerError as error:
    print(error)
"""
    done = warm.run(["-c", script], cwd=ROOT, timeout=600, env={**os.environ})
    assert said in done.stdout, done.stdout + done.stderr


def test_a_package_that_torchtitans_parser_needs_is_named(tmp_path):
    without = "import sys\nsys.modules['typeguard'] = None\n"
    environment = {"SHARDPLAN_PROGRAMS": str(build_folder() / "bin"), **os.environ}
    done = warm.run(["-c", without + COMMAND, "-q", *MODELS["llama3"]], cwd=tmp_path, timeout=600, env=environment)
    assert done.returncode == 4 and "(pip install typeguard)" in done.stderr, done.stderr


VARIED = ("--vary", "parallelism.expert_parallel_degree=2,3", "--vary", "activation_checkpoint=none")


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    """The table's lines, the rows."""
    rows = tmp_path_factory.mktemp("variants") / "rows.json"
    done = run("-q", *words_of("deepseek_v3"), "--cluster", "h100_sxm_8", "--report", rows, *VARIED)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), json.loads(rows.read_text())


def test_variants_are_a_table(variants):
    lines, written = variants
    assert lines[0].split()[:2] == ["expert_parallel_degree", "activation_checkpoint"]
    assert lines[2].split()[:2] == ["2", "none"] and lines[3].split()[:3] == ["3", "none", "-"]
    assert lines[4].startswith("parallelism.expert_parallel_degree 3, activation_checkpoint none: ")
    assert written[0]["tokens_per_second"] > 0 and "error" in written[1]


def test_a_sweep_has_the_same_variants(variants, tmp_path):
    _, written = variants
    rows = tmp_path / "rows.csv"
    words = [f"--trace-flag={word}" for word in words_of("deepseek_v3")[8:]]  # behind module, config and SMALL
    environment = {**os.environ, "SHARDPLAN_PYTHON": sys.executable}
    done = subprocess.run(
        [
            build_folder() / "bin" / "shardplan", "sweep", "torchtitan:deepseek_v3:deepseek_v3_debugmodel", "--batch",
            "2", "--seq", "512", "--cluster", "h100_sxm_8", *VARIED, *words, "-q", "-o", rows,
        ],
        capture_output=True, text=True, timeout=600, check=False, env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = list(csv.DictReader(rows.read_text().splitlines()))
    for theirs, ours in zip(written, found, strict=True):
        assert {key: ours[key] for key in theirs if "." in key} == {key: theirs[key] for key in theirs if "." in key}
        assert ours["error"] == theirs.get("error", "")
        if "error" not in theirs:
            assert ours["step_ms"] == f"{theirs['step_ms']:.3f}" and ours["fits"] == "yes"
            assert int(ours["tokens_per_second"]) == theirs["tokens_per_second"]
            assert ours["reserved_gib"] == f"{theirs['reserved_gib']:.3f}"


@pytest.mark.parametrize(
    "varied, said",
    [
        ("parallelism.nope=1", "parallelism.nope 1: Unrecognized options: --parallelism.nope, 1\n"),
        ("training.seq_len=x", "training.seq_len x: Error parsing --training.seq-len: invalid literal for int() with"),
    ],
)
def test_a_variant_that_torchtitans_parser_refuses_says_so(varied, said):
    done = run("-q", *MODELS["llama3"][:4], "--vary", varied)
    assert done.returncode == 2 and said in done.stdout, done.stdout + done.stderr
