# SPDX-License-Identifier: Apache-2.0
"""`shardplan trace --muon`: which matrices Muon steps, and the form of `optimizer_steps`. The steps themselves are held
against ranks in conformance/test_muon_conformance.py and rehearse/test_muon_step.py."""

import io
import itertools
import json

import pytest
from conftest import installed_pytorch
from test_tracer_command import SMALL

from shardplan.tracer import cli, document
from shardplan.tracer.errors import TracerError, UsageProblem
from shardplan.tracer.muon_matrices import Matrix, matrices
from shardplan.tracer.muon_options import MuonOptions, Ranks
from shardplan.tracer.muon_steps import add_optimizer_steps, record_step

pytestmark = pytest.mark.skipif(installed_pytorch() != "2.15", reason="DTensor's choices are those of one release")
PARTS = ("update", "orthogonalize", "apply")


def model(*parameters, **modules):
    """A trace's static part. parameters: (FQN, shape) or an entry; modules: class by FQN with _ for dots."""
    entries = [p if isinstance(p, dict) else {"fqn": p[0], "shape": list(p[1]), "dtype": "float32"} for p in parameters]
    tree: dict[str, dict] = {"": {"fqn": "", "class_name": "Model"}}
    for number, entry in enumerate(entries):
        for fqn in (entry["fqn"], *entry.get("shared_with", ())):
            owner, _, name = fqn.rpartition(".")
            kind = modules.get(owner.replace(".", "_"), "Linear")
            module = tree.setdefault(owner, {"fqn": owner, "class_name": kind})
            module.setdefault("parameters", []).append({"name": name, "parameter": number})
    return {"modules": list(tree.values()), "parameters": entries}


def shapes(trace, *patterns):
    return [(*matrix.shape, matrix.is_cut) for matrix in matrices(trace, patterns)]


# ---- which parameters ----


def test_matrices_of_hidden_layers_are_stepped():
    trace = model(
        ("tokens.weight", (100, 8)),
        ("positions.weight", (16, 8)),
        ("layers.0.attention.output.weight", (8, 12)),
        ("layers.0.mlp.weight", (32, 8)),
        ("layers.0.mlp.bias", (32,)),
        ("layers.0.norm.weight", (8,)),
        ("output.weight", (100, 8)),
        tokens="Embedding", positions="LearnedPositionalEmbedding",
    )  # fmt: skip
    assert shapes(trace) == [(8, 12, True), (32, 8, True)]
    marked = [entry["fqn"] for entry in trace["parameters"] if entry.get("muon")]
    assert marked == ["layers.0.attention.output.weight", "layers.0.mlp.weight"]


@pytest.mark.parametrize("name", ["lm_head", "output", "head", "unembed", "model.decoder.head"])
def test_the_head_is_not_stepped(name):
    assert shapes(model((f"{name}.weight", (100, 8)), ("layers.0.up.weight", (8, 8)))) == [(8, 8, True)]


def test_a_module_that_is_named_as_a_head_and_is_no_linear_is_stepped():
    assert shapes(model(("output.weight", (4, 8)), output="Router")) == [(4, 8, True)]


def test_parts_of_a_transformers_model_are_embeddings_and_head():
    trace = model(("a.weight", (100, 8)), ("b.weight", (8, 100)), ("c.weight", (8, 8)))
    by_fqn = {module["fqn"]: module for module in trace["modules"]}
    by_fqn["a"]["parts"], by_fqn["b"]["parts"] = ["input_embeddings"], ["output_embeddings"]
    assert shapes(trace) == [(8, 8, True)]


def test_a_tie_with_an_embedding_is_no_matrix():
    tied = {"fqn": "classifier.weight", "shape": [100, 8], "dtype": "float32", "shared_with": ["tokens.weight"]}
    assert shapes(model(tied, ("up.weight", (8, 4)), tokens="Embedding")) == [(8, 4, True)]


def test_experts_are_whole_matrices_and_other_stacks_are_none():
    trace = model(
        ("experts.gate_up", (4, 16, 8)),
        ("experts.gate_up_bias", (4, 16)),
        ("patches.position", (1, 50, 8)),
        ("mixer.conv1d.weight", (64, 1, 4)),
        ("audio.conv.weight", (64, 80, 3)),
        ("first.c_attn.weight", (8, 24)),
        audio_conv="Conv1d", mixer_conv1d="Conv1d", first_c_attn="Conv1D",
    )  # fmt: skip
    assert shapes(trace) == [(16, 8, False), (8, 24, True)]


def test_frozen_parameters_are_not_stepped():
    frozen = {"fqn": "a.weight", "shape": [8, 8], "dtype": "float32", "requires_grad": False}
    assert shapes(model(frozen, ("b.weight", (8, 4)))) == [(8, 4, True)]


def test_equal_matrices_are_one_and_other_dtypes_are_others():
    half = {"fqn": "c.weight", "shape": [8, 4], "dtype": "bfloat16"}
    found = matrices(model(("a.weight", (8, 4)), ("b.weight", (8, 4)), half))
    assert found == [Matrix((8, 4), "float32"), Matrix((8, 4), "bfloat16")]


def test_patterns_say_it_otherwise():
    trace = model(
        ("tokens.weight", (100, 8)), ("layers.0.up.weight", (32, 8)), ("layers.1.up.weight", (16, 8)),
        ("layers.0.up.bias", (32,)), tokens="Embedding",
    )  # fmt: skip
    assert shapes(trace, "layers.1.*.weight", "tokens.weight") == [(100, 8, True), (16, 8, True)]
    assert shapes(trace, "class:Embedding") == [(100, 8, True)]
    assert shapes(trace, "layers.0.up.*") == [(32, 8, True)], "a bias beside a matrix"
    assert [entry.get("muon", False) for entry in trace["parameters"]] == [True, True, True, False]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layers.9.*", "--muon-matrices layers.9.*: no parameter has such a name"),
        ("class:Conv2d", "--muon-matrices class:Conv2d: no parameter has such a name"),
        ("*.bias", "--muon-matrices *.bias: expected a matrix that trains; up.bias has the shape [32]"),
        ("frozen.weight", "--muon-matrices frozen.weight: expected a matrix that trains; frozen.weight is frozen"),
    ],
)
def test_a_pattern_without_a_matrix_is_an_error_that_names_it(pattern, message):
    frozen = {"fqn": "frozen.weight", "shape": [8, 8], "dtype": "float32", "requires_grad": False}
    with pytest.raises(UsageProblem) as error:
        matrices(model(("up.weight", (32, 8)), ("up.bias", (32,)), frozen), ["up.weight", pattern])
    assert str(error.value) == message


def test_blocks_of_rows_are_matrices_of_their_own():
    trace = model(("qkv.weight", (24, 8)), ("up.weight", (32, 8)))
    found = matrices(trace, blocks=[("qkv.weight", 8)])
    assert found == [Matrix((24, 8), "float32"), Matrix((32, 8), "float32"), Matrix((8, 8), "float32", False)]
    with pytest.raises(UsageProblem, match="--muon-blocks qkv.*=7: 7 rows do not divide the 24 of qkv.weight"):
        matrices(trace, blocks=[("qkv.*", 7)])


def test_parameters_that_tensor_parallelism_cuts_are_left_out_and_said():
    def placed(fqn, shape, dim):
        placements = [{"mesh_dim": "tp", "size": 4, "dim": dim}]
        return {"fqn": fqn, "shape": shape, "dtype": "float32", "placements": placements}

    trace = model(placed("wq.weight", [4, 8], 0), placed("wo.weight", [8, 4], 1), placed("experts.w", [2, 16, 8], 0),
                  placed("other.w", [2, 4, 8], 1), ("up.weight", (32, 8)))  # fmt: skip
    notes: list[str] = []
    found = matrices(trace, note=notes.append)
    assert [matrix.shape for matrix in found] == [(16, 8), (32, 8)], "experts on this rank are whole"
    assert notes == [
        "optimizer_steps is without wq.weight, which is distributed before FSDP shards it (2 more are, too)"
    ]


# ---- the steps ----


def added(trace, **options):
    trace |= {"recorded_with": "torch", "forwards": [], "backwards": []}
    add_optimizer_steps(trace, MuonOptions(**options))
    return trace["optimizer_steps"]


def test_each_matrix_has_a_step_for_each_number_of_ranks_and_the_whole_one():
    trace = model(("a.weight", (8, 4)), ("b.weight", (8, 4)), ("c.w", (3, 6, 4)), ("d.weight", (6, 4)))
    steps = added(trace, ranks=(Ranks(4), Ranks(2), Ranks(2, 2), Ranks(2)))
    assert [(s["shape"], s["ranks"], s.get("replicas", 1)) for s in steps] == [
        ([8, 4], 1, 1), ([8, 4], 2, 1), ([8, 4], 2, 2), ([8, 4], 4, 1),
        ([6, 4], 1, 1), ([6, 4], 2, 1), ([6, 4], 2, 2), ([6, 4], 4, 1),
    ]  # fmt: skip
    assert trace["recorded_with"] == "torch; muon on cuda, 8 a host"


def test_a_matrix_with_fewer_rows_than_ranks_has_no_step():
    """torch refuses it (findings/torch_muon_fewer_rows_than_ranks.sh)."""
    steps = added(model(("router.weight", (4, 8))), ranks=(Ranks(4), Ranks(5), Ranks(8)))
    assert [step["ranks"] for step in steps] == [1, 4]
    with pytest.raises(TracerError, match=r"step of 4 x 8 in float32 on 5 ranks fails: "):
        record_step(Matrix((4, 8), "float32"), Ranks(5), MuonOptions())


def test_storages_of_all_steps_are_numbered_on_and_die_in_their_step():
    trace = model(("a.weight", (8, 4)))
    trace["inputs"] = [{"name": "x", "shape": [1], "dtype": "float32", "storage": 11}]
    steps = added(trace, ranks=(Ranks(2), Ranks(4)))
    births = []
    for step in steps:
        events = list(itertools.chain.from_iterable(step[part] for part in PARTS))
        born, alive = [], set()
        for event in events:
            if event[0] == "+":
                assert event[3:] == ["optimizer_temp", -1]
                born.append(event[1])
                alive.add(event[1])
            elif event[0] == "-":
                alive.remove(event[1])
            else:
                assert event[0] == "op" and event[2] == -1 and event[10] == []
                assert alive.issuperset([*event[8], *event[9]])
        assert not alive
        births += born
    assert births == list(range(12, 12 + len(births)))


def operators(step, part):
    return [event[1].removeprefix("aten.") for event in step[part] if event[0] == "op"]


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_parts_of_a_step_are_those_of_torch(nesterov):
    step = record_step(Matrix((6, 4), "float32"), Ranks(), MuonOptions(nesterov=nesterov, ns_steps=2))
    assert operators(step, "update") == ["lerp_", "lerp"][: 1 + nesterov]
    assert operators(step, "orthogonalize") == [
        "_to_copy", "linalg_vector_norm", "clamp", "div_", *["mm", "addmm", "addmm"] * 2
    ]  # fmt: skip
    assert operators(step, "apply") == ["mul_", "add_"]
    assert (step.get("nesterov", True), step["ns_steps"]) == (nesterov, 2)
    assert step["orthogonalize"][0][:3] == ["+", step["orthogonalize"][0][1], 6 * 4 * 2], "bfloat16"


def test_products_have_their_flops():
    """A tall matrix is transposed: 4 rows, and its Gram matrix is 4 x 4."""
    step = record_step(Matrix((6, 4), "float32"), Ranks(), MuonOptions(ns_steps=1))
    products = [event[4] for event in step["orthogonalize"] if event[0] == "op" and event[4]]
    assert products == [2 * 4 * 4 * 6, 2 * 4 * 4 * 4, 2 * 4 * 4 * 6]


def kinds(step):
    return [event[11]["kind"] for part in PARTS for event in step[part] if event[0] == "op" and len(event) > 11]


def test_gpus_of_a_node_and_the_device_decide_collectives():
    matrix, ranks = Matrix((1024, 1024), "float32"), Ranks(4)
    one_node, others, cpus = (
        record_step(matrix, ranks, options)
        for options in (MuonOptions(), MuonOptions(devices_per_host=1), MuonOptions(device="cpu"))
    )
    assert "reduce_scatter" not in kinds(one_node) and "reduce_scatter" in kinds(others)
    assert "all_to_all" in kinds(others) and "all_to_all" not in kinds(cpus), "Gloo gathers in its place"


def test_replicas_take_part():
    """DTensor cuts a whole matrix over replicas, too."""
    step = record_step(Matrix((2048, 512), "float32"), Ranks(2, 2), MuonOptions())
    communicators = {e[11]["communicator"] for part in PARTS for e in step[part] if e[0] == "op" and len(e) > 11}
    assert communicators == {-1, -2}
    alone = record_step(Matrix((2048, 512), "float32"), Ranks(2), MuonOptions())
    assert len(kinds(step)) > len(kinds(alone))


def test_a_step_is_the_same_whatever_was_traced_before():
    matrix, options = Matrix((64, 32), "float32"), MuonOptions()
    first = record_step(matrix, Ranks(4), options)
    record_step(matrix, Ranks(8), options)
    record_step(Matrix((64, 32), "bfloat16"), Ranks(4), options)
    assert record_step(matrix, Ranks(4), options) == first


# ---- the command ----


def traced(tmp_path, config, *arguments):
    (tmp_path / "config.json").write_text(json.dumps(config))
    output = tmp_path / "trace.json"
    assert cli.main([str(tmp_path / "config.json"), "-q", "--seq", "16", "-o", str(output), *arguments]) == 0
    return json.loads(output.read_text())


def test_a_configs_trace_has_the_steps_and_reads(tmp_path, shardplan):
    trace = traced(tmp_path, SMALL["llama"], "--muon", "8,2x4")
    steps = [(step["shape"], step["ranks"], step.get("replicas", 1)) for step in trace["optimizer_steps"]]
    different = ([64, 64], [16, 64], [128, 64], [64, 128])
    assert steps == [(shape, *ranks) for shape in different for ranks in ((1, 1), (4, 2), (8, 1))]
    done = shardplan("validate", tmp_path / "trace.json")
    assert done.returncode == 0, done.stdout + done.stderr
    written = io.StringIO()
    document.write(trace, written)
    assert written.getvalue() == (tmp_path / "trace.json").read_text()


def test_a_configs_experts_and_conv1d(tmp_path):
    trace = traced(tmp_path, SMALL["mixtral"], "--muon", "4")
    ranks: dict[tuple, list[int]] = {}
    for step in trace["optimizer_steps"]:
        ranks.setdefault(tuple(step["shape"]), []).append(step["ranks"])
    # Gate and up lie in one matrix of an expert; the router has 4 rows.
    assert ranks == {(64, 64): [1, 4], (16, 64): [1, 4], (4, 64): [1, 4], (256, 64): [1], (64, 128): [1]}
    trace = traced(tmp_path, SMALL["gpt2"], "--muon", "4", "--muon-ns-steps", "3", "--no-muon-nesterov")
    assert {tuple(step["shape"]) for step in trace["optimizer_steps"]} == {(64, 192), (64, 64), (64, 256), (256, 64)}
    assert {(step["nesterov"], step["ns_steps"]) for step in trace["optimizer_steps"]} == {(False, 3)}


def test_cpu_ranks_have_their_own_collectives(tmp_path):
    by_sdpa, by_flag = (
        traced(tmp_path, SMALL["llama"], "--muon", "4", *flags)
        for flags in (("--sdpa", "cpu"), ("--sdpa", "cpu", "--muon-device", "cuda"))
    )
    assert by_sdpa["recorded_with"].endswith("muon on cpu")
    assert by_flag["recorded_with"].endswith("muon on cuda, 8 a host")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--muon-matrices", "*"], "--muon-matrices is for --muon RANKS, which is not given"),
        (["--no-muon-nesterov"], "--no-muon-nesterov is for --muon RANKS"),
        (["--muon", "4", "--muon-ns-steps", "100"], "--muon-ns-steps 100: torch.optim.Muon takes less than 100"),
        (["--muon", "4", "--muon-matrices", "lm_head.*s"], "--muon-matrices lm_head.*s: no parameter has such a name"),
    ],
)
def test_usage_errors_of_the_command(tmp_path, arguments, message, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SMALL["llama"]))
    given = [str(tmp_path / "config.json"), "-q", "--seq", "8", "-o", str(tmp_path / "t.json"), *arguments]
    assert cli.main(given) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize("text", ["", "0", "4,", "x4", "2x", "2x2x2", "-1", "four"])
def test_numbers_of_ranks_are_positive(text, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["x:y", f"--muon={text}"])
    assert left.value.code == 2
    assert "expected numbers of ranks, each RANKS or REPLICASxRANKS" in " ".join(capsys.readouterr().err.split())
