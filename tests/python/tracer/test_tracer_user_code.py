# SPDX-License-Identifier: Apache-2.0
"""Models as users have them: builders written for a GPU, values that are read, recurrent layers, mixtures of
experts."""

import json
import sys

import pytest
import torch
from conftest import ROOT
from test_tracer_command import SMALL, _config, _operators, _trace

sys.path.insert(0, str(ROOT / "tools" / "python"))
HERE = ROOT / "tests" / "python" / "tracer"

from shardplan.tracer import cli  # noqa: E402


@pytest.fixture(autouse=True)
def in_this_folder(monkeypatch):
    monkeypatch.chdir(HERE)


def trace(tmp_path, name, *arguments):
    return _trace(tmp_path, f"tracer_user_code:{name}", "--batch", "2", "--seq", "8", *arguments)


def refused(capsys, tmp_path, name, *arguments):
    code = cli.main([f"tracer_user_code:{name}", "-q", "-o", str(tmp_path / "t.json"), *arguments])
    assert code in (2, 3)
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1, error
    return error


def but_for_source(document, *more):
    return {key: value for key, value in document.items() if key not in ("model", "source", *more)}


# ---- builders ----

SAME = (
    "to_cuda to_device_0 to_another_device cuda cuda_inputs to_cpu on_the_cpu on_meta to_empty where_there_is_one "
    "compiled filled reads_and_moves deepcopied"
).split()


@pytest.fixture(scope="module")
def as_it_is(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HERE)
        return trace(tmp_path_factory.mktemp("plain"), "as_it_is")


@pytest.mark.parametrize("name", SAME)
def test_where_and_how_a_model_is_built_changes_no_trace(name, as_it_is, tmp_path):
    assert but_for_source(trace(tmp_path, name)) == but_for_source(as_it_is)


@pytest.mark.parametrize(
    ("name", "dtype"), [("half", "float16"), ("bfloat16", "bfloat16"), ("to_device_and_dtype", "bfloat16")]
)
def test_a_model_that_is_cast_is_one_of_that_dtype(name, dtype, tmp_path):
    made = trace(tmp_path, name)
    assert made["compute_dtype"] == dtype and {p["dtype"] for p in made["parameters"]} == {dtype}
    assert made["parameters"][0]["shared_with"] == ["out.weight"], "a tie stays a tie"
    plain = trace(tmp_path, "as_it_is", "--dtype", dtype)
    assert but_for_source(made, "parameters", "buffers", "forwards", "backwards") == but_for_source(
        plain, "parameters", "buffers", "forwards", "backwards"
    )


@pytest.mark.parametrize("name", ["from_config", "from_pretrained"])
def test_a_transformers_model_is_built_moved_and_cast_by_the_user(name, tmp_path):
    made = trace(tmp_path, name)
    assert made["compute_dtype"] == "bfloat16" and made["backwards"]
    operators = {event[1] for event in made["forwards"][0]["events"] if event[0] == "op"}
    assert "aten._scaled_dot_product_flash_attention" in operators, (
        "on a GPU transformers makes no mask for sequences without padding"
    )
    assert "aten._scaled_dot_product_efficient_attention" not in operators


def test_a_copy_of_a_module_has_the_operators_of_the_module(tmp_path):
    """A copy that came with a fake mode of its own had its tensors converted by ours: a transposed weight was memory of
    its own."""
    made = trace(tmp_path, "trains_a_copy")
    assert [p.get("requires_grad", True) for p in made["parameters"]] == [False, False, True, True]
    found = [event[1] for event in made["forwards"][0]["events"] if event[0] == "op"]
    assert found.count("aten.addmm") == 2 and "aten.t" not in found, found


def test_a_peft_model_with_modules_to_save_is_traced_by_the_command(shardplan, tmp_path):
    """Copied modes free their references to storages a second time, some when the interpreter ends: in a process of its
    own."""
    pytest.importorskip("peft")
    path = tmp_path / "t.json"
    made = shardplan(
        "trace", "tracer_user_code:lora_with_modules_to_save", "--seq", "8", "--loss", "sum", "-q", "-o", path, cwd=HERE
    )
    assert made.returncode == 0, made.stderr
    trained = {p["fqn"] for p in json.loads(path.read_text())["parameters"] if p.get("requires_grad", True)}
    assert "base_model.model.lm_head.modules_to_save.default.weight" in trained
    assert "base_model.model.lm_head.original_module.weight" not in trained


def test_torch_cuda_is_as_before_afterwards(tmp_path):
    before = torch.cuda.is_available(), torch.cuda.current_device, torch.nn.Module._apply
    trace(tmp_path, "to_device_0")
    assert before == (torch.cuda.is_available(), torch.cuda.current_device, torch.nn.Module._apply)


@pytest.mark.parametrize("name", ["made_in_the_loss", "of_the_module", "said_to_be_on_the_cpu"])
def test_labels_on_the_cpu_are_an_input_as_those_on_the_device(name, tmp_path):
    plain = trace(tmp_path, "labels_on_the_device")
    assert [entry["name"] for entry in plain["inputs"]] == ["args.0", "captured.0"]
    assert but_for_source(trace(tmp_path, f"labels_{name}")) == but_for_source(plain)


def test_targets_on_the_cpu_are_an_input_and_numbers_are_none(tmp_path):
    made = trace(tmp_path, "labels_compared")
    assert [(entry["name"], entry["shape"]) for entry in made["inputs"]] == [("args.0", [4, 8]), ("captured.0", [4, 5])]


# ---- values ----


@pytest.mark.parametrize("name", ["item", "condition", "mask", "found", "selected", "sizes"])
def test_a_value_that_is_read_names_module_line_and_way_out(name, capsys, tmp_path):
    error = refused(capsys, tmp_path, name)
    assert "in inner (Read)" in error and "tracer_user_code.py:" in error and "--answer FQN=VALUE" in error


def test_the_line_is_the_users(capsys, tmp_path):
    assert "`if y.sum().item() > 0:  # the line that reads`" in refused(capsys, tmp_path, "item")


def test_what_no_answer_helps_says_so(capsys, tmp_path):
    error = refused(capsys, tmp_path, "as_numpy")
    assert "stand-in" in error and "--answer" not in error


def test_a_failure_of_the_model_names_module_and_line(capsys, tmp_path):
    code = cli.main(["tracer_models:failing", "-q", "-o", str(tmp_path / "t.json")])
    error = capsys.readouterr().err
    assert (
        code == 3 and "heads do not divide the width" in error and "tracer_models.py:" in error and "`raise " in error
    )


def names(made, kind="forwards"):
    return [e[1] for e in _operators(made, kind)]


def test_an_answer_chooses_the_branch(tmp_path):
    taken, other = (trace(tmp_path, "item", "--answer", f"inner={value}") for value in (1, 0))
    assert names(taken).count("aten.mul") == 1 and "aten.mul" not in names(other)
    assert names(trace(tmp_path, "condition", "--answer", "inner=true")).count("aten.mul") == 1
    assert but_for_source(trace(tmp_path, "item", "--answer", "(root)=1")) == but_for_source(taken), (
        "and those below it"
    )


@pytest.mark.parametrize("name", ["mask", "found"])
def test_an_answer_says_how_many_a_mask_finds(name, tmp_path):
    made = trace(tmp_path, name, "--answer", "inner=3")
    rows = [t["shape"] for t in made["forwards"][0]["tensors"] if t["shape"] == [3, 8]]
    assert rows and "aten.nonzero" in names(made) and "aten.index_put_" in names(made, "backwards")
    graded = {e[1] for e in made["backwards"][0]["events"] if e[0] == "param_grad"}
    assert graded == set(range(len(made["parameters"])))


def test_answers_are_taken_in_order(tmp_path):
    made = trace(tmp_path, "sizes", "--answer", "inner=1,2,0,1")
    assert "aten.cat" in names(made) and made["forwards"][0]["tensors"][-1]["shape"] == [4, 8]


def test_a_loss_may_read_values_too(capsys, tmp_path):
    assert "tracer_user_code.py:" in refused(capsys, tmp_path, "in_loss")
    assert trace(tmp_path, "in_loss", "--answer", "(loss)=0")["backwards"]


def test_a_stand_in_has_the_names_of_what_it_stands_for(tmp_path):
    stands, chosen = trace(tmp_path, "stand_in"), trace(tmp_path, "item", "--answer", "inner=1")
    assert stands["parameters"] == chosen["parameters"] and stands["modules"] == chosen["modules"]


def test_an_answer_that_nobody_asks_for_is_an_error(capsys, tmp_path):
    assert "--answer out=...: no value is read there" in refused(
        capsys, tmp_path, "item", "--answer", "inner=1", "--answer", "out=1"
    )


@pytest.mark.parametrize("answer", ["inner", "inner=", "inner=some", "inner=1,x"])
def test_an_answer_that_is_none_is_a_usage_error(answer, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["tracer_user_code:item", "--answer", answer])
    assert exit_info.value.code == 2 and "expected FQN=VALUE" in capsys.readouterr().err


# ---- recurrent layers ----


@pytest.mark.parametrize(("name", "reserved"), [("lstm", 6), ("gru", 5), ("rnn", 1)])
def test_a_recurrent_layer_is_one_kernel(name, reserved, tmp_path):
    made = trace(tmp_path, name)
    kernel = [e for e in _operators(made, "forwards") if e[1] == "aten._cudnn_rnn"]
    backward = [e for e in _operators(made, "backwards") if e[1] == "aten._cudnn_rnn_backward"]
    assert len(kernel) == len(backward) == 1
    gates = {"lstm": 4, "gru": 3, "rnn": 1}[name]
    rows, weights = 3 * 5, gates * 16 * (8 + 16) + gates * 16 * (16 + 16)
    assert kernel[0][4] == 2 * rows * weights and backward[0][4] == 2 * kernel[0][4]
    saved = [e[2] for e in made["forwards"][0]["events"] if e[0] == "+" and e[3] == "saved"]
    assert reserved * 16 * 2 * rows * 4 in saved
    graded = {e[1] for e in made["backwards"][0]["events"] if e[0] == "param_grad"}
    assert graded == set(range(len(made["parameters"])))


@pytest.mark.parametrize("name", ["lstm_with_everything", "cells"])
def test_other_recurrent_modules_trace(name, tmp_path):
    made = trace(tmp_path, name)
    graded = {e[1] for e in made["backwards"][0]["events"] if e[0] == "param_grad"}
    assert graded == set(range(len(made["parameters"])))


# ---- mixtures of experts ----

EXPERTS = {
    "mixtral": SMALL["mixtral"],
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 128,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "vocab_size": 128,
    },
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_trace_alike_in_every_dtype(name, tmp_path):
    config = _config(tmp_path, json.dumps(EXPERTS[name]))
    single, half = (_trace(tmp_path, config, "--seq", "32", "--dtype", dtype) for dtype in ("float32", "bfloat16"))

    def products(made, kind):
        return [e[4] for e in _operators(made, kind) if e[1] == "aten._grouped_mm"]

    for kind in ("forwards", "backwards"):
        assert products(single, kind) and products(single, kind) == products(half, kind)
    saved = [
        sum(e[2] for e in made["forwards"][0]["events"] if e[0] == "+" and e[3] == "saved") for made in (single, half)
    ]
    assert saved[0] > saved[1]
