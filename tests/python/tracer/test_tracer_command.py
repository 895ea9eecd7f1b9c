# SPDX-License-Identifier: Apache-2.0
"""`python -m shardplan.tracer` as a user meets it: sources, configs, errors and exit codes."""

import json
import sys

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tools" / "python"))

from shardplan.tracer import cli, fake_cuda  # noqa: E402
from shardplan.tracer.errors import EnvironmentProblem  # noqa: E402

MODELS = ROOT / "examples" / "models"
SMALL = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 128,
        "max_position_embeddings": 256,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 128,
        "sliding_window": None,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "model_type": "gpt2",
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 64,
        "vocab_size": 128,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "d_model": 64,
        "d_ff": 128,
        "d_kv": 16,
        "num_heads": 4,
        "num_layers": 2,
        "vocab_size": 128,
        "is_encoder_decoder": True,
    },
    "vit": {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "image_size": 32,
        "patch_size": 8,
        "num_labels": 10,
    },
    "bert": {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 128,
        "max_position_embeddings": 64,
    },
}


@pytest.fixture(autouse=True)
def in_this_folder(monkeypatch):
    monkeypatch.chdir(ROOT / "tests" / "python" / "tracer")


def _config(tmp_path, content) -> str:
    path = tmp_path / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def _trace(tmp_path, *arguments):
    output = tmp_path / "trace.json"
    assert cli.main([*arguments, "-q", "-o", str(output)]) == 0
    return json.loads(output.read_text())


def _operators(trace, *kinds):
    return [e for kind in kinds or ("forwards", "backwards") for p in trace[kind] for e in p["events"] if e[0] == "op"]


# ---- configs ----


@pytest.mark.parametrize("family", SMALL)
def test_each_family_traces_from_its_config_with_fused_attention(family, tmp_path):
    trace = _trace(tmp_path, _config(tmp_path, SMALL[family]), "--batch", "2", "--seq", "32")
    assert trace["compute_dtype"] == "bfloat16" and {p["dtype"] for p in trace["parameters"]} == {"float32"}
    assert trace["tokens_per_batch"] == (2 if family == "vit" else 64)
    names = {e[1] for e in _operators(trace)}
    kernel = "efficient" if family == "t5" else "flash"  # a position bias is a mask
    assert (
        f"aten._scaled_dot_product_{kernel}_attention" in names
        and f"aten._scaled_dot_product_{kernel}_attention_backward" in names
    )
    assert not names & {"aten.bmm", "aten.baddbmm"}, "no unfused attention"
    graded = {e[1] for e in trace["backwards"][0]["events"] if e[0] == "param_grad"}
    assert graded == set(range(len(trace["parameters"]))), "every parameter gets its gradient, once per tie"
    roles = {e[3] for p in (*trace["forwards"], *trace["backwards"]) for e in p["events"] if e[0] == "+"}
    assert roles == {"saved", "forward_temp", "output", "loss_saved", "loss_temp", "backward_temp", "parameter_grad"}


def test_ties_of_a_config_are_ties_of_the_trace(tmp_path):
    trace = _trace(tmp_path, _config(tmp_path, SMALL["gpt2"]), "--seq", "16")
    assert trace["parameters"][0] == {
        "fqn": "transformer.wte.weight",
        "shape": [128, 64],
        "dtype": "float32",
        "shared_with": ["lm_head.weight"],
    }


def test_experts_are_grouped_products_of_all_routed_tokens(tmp_path):
    config = SMALL["mixtral"]
    trace = _trace(tmp_path, _config(tmp_path, config), "--seq", "32")
    products = [e[4] for e in _operators(trace, "forwards") if e[1] == "aten._grouped_mm"]
    rows, width, inner = 32 * config["num_experts_per_tok"], config["hidden_size"], config["intermediate_size"]
    assert products == [2 * rows * width * 2 * inner, 2 * rows * inner * width] * config["num_hidden_layers"]
    assert "any routing" in trace["recorded_with"]


@pytest.mark.parametrize("loss, dtype", [("cross_entropy", "float32"), ("cross_entropy_no_upcast", "bfloat16")])
def test_the_loss_of_a_config_can_be_chosen(loss, dtype, tmp_path):
    trace = _trace(tmp_path, _config(tmp_path, SMALL["llama"]), "--seq", "16", "--loss", loss)
    assert [e[3] for e in _operators(trace, "forwards") if e[1] == "aten._log_softmax"] == [dtype]


def test_the_models_own_loss_lies_inside_the_root(tmp_path):
    trace = _trace(tmp_path, _config(tmp_path, SMALL["llama"]), "--seq", "16", "--loss", "model")
    softmax = [e for e in _operators(trace, "forwards") if e[1] == "aten._log_softmax"]
    assert [e[2] for e in softmax] == [0] and [i["name"] for i in trace["inputs"]] == ["input_ids", "labels"]


@pytest.mark.parametrize(
    "path, billions",
    [
        ("llama-3.1-8b", 8.030),
        ("llama-3.1-70b", 70.554),
        ("llama-3.1-405b", 405.853),
        ("mixtral-8x7b", 46.703),
        ("gpt2-xl", 1.558),
        ("t5-large", 0.738),
        ("vit-large", 0.304),
        ("bert-large", 0.335),
    ],
)
def test_example_configs_have_the_sizes_of_their_models(path, billions, tmp_path):
    from shardplan.tracer import huggingface
    from pathlib import Path

    model = huggingface.HuggingFaceModel(Path(MODELS / f"{path}.json"))
    with torch.device("meta"):
        module = model.build("grouped_mm")
    assert round(sum(p.numel() for p in module.parameters()) / 1e9, 3) == billions


def test_a_callable_gives_its_own_images(tmp_path, capsys):
    assert cli.main(["tracer_models:anything", "-q", "--images", "1", "-o", str(tmp_path / "t.json")]) == 2
    assert "a callable returns its own inputs" in capsys.readouterr().err


# ---- configs of other kinds ----

_TEXT = {**{k: v for k, v in SMALL["llama"].items() if k != "architectures"}}
_VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}
_MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
_LATENT = {
    **_TEXT,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
_OWN_TYPE = {
    **_LATENT, "model_type": "a_type_of_its_own", "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "own.Own"},
}
_LLAMA4 = {**_TEXT, "model_type": "llama4_text", "num_local_experts": 4}
_QWEN = {**_TEXT, "model_type": "qwen2_5_vl_text", "rope_parameters": _MROPE, "bos_token_id": 1, "eos_token_id": 2}
_SINKS = {**_TEXT, "model_type": "gpt_oss", "num_local_experts": 4}
# config, class of the root, what the note says, an operator of the forward
OTHER_CONFIGS = {
    "eager attention, quantized weights": (
        {**_SINKS, "architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}},
        "GptOssForCausalLM",
        ("attention eager", "quantization (mxfp4)"),
        "aten._softmax",
    ),
    "a type of its own": (
        _OWN_TYPE,
        "DeepseekV3ForCausalLM",
        ('"a_type_of_its_own" is not known', 'of model type "deepseek_v3"'),
        "aten._grouped_mm",
    ),
    "a composite type of its own": (
        {
            "model_type": "own_vl", "architectures": ["OwnVLForConditionalGeneration"], "text_config": _OWN_TYPE,
            "vision_config": _VISION,
        },
        "DeepseekV3ForCausalLM",
        ('"own_vl" is not known', "text model alone"),
        "aten._grouped_mm",
    ),
    "composite": (
        {
            "model_type": "llava",
            "architectures": ["LlavaForConditionalGeneration"],
            "text_config": _TEXT,
            "vision_config": {**_VISION, "model_type": "clip_vision_model"},
        },
        "LlamaForCausalLM",
        ("composite config (LlavaForConditionalGeneration)",),
        "aten._scaled_dot_product_flash_attention",
    ),
    "composite, the text class under the composite's type": (
        {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"], "text_config": _LLAMA4},
        "Llama4ForCausalLM",
        ("composite config (Llama4ForConditionalGeneration)",),
        "aten._scaled_dot_product_flash_attention",
    ),
    "no class of the text alone": (
        {
            "model_type": "qwen2_5_vl",
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "text_config": _QWEN,
            "vision_config": {**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
        },
        "Qwen2_5_VLForConditionalGeneration",
        ("takes image and video, too", "no gradient"),
        "aten._scaled_dot_product_flash_attention",
    ),
}


_LLAMA4_VISION = {
    "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32, "pixel_shuffle_ratio": 0.5,
    "intermediate_size": 128,
}
WITH_IMAGES = {
    "llava": OTHER_CONFIGS["composite"][0],
    "llama4": {
        **OTHER_CONFIGS["composite, the text class under the composite's type"][0],
        "vision_config": {**_VISION, "model_type": "llama4_vision_model", **_LLAMA4_VISION},
    },
    "gemma3": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {**_TEXT, "model_type": "gemma3_text", "head_dim": 16},
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
}


@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_a_multimodal_config_with_images_is_traced_whole(kind, tmp_path, capsys):
    config = WITH_IMAGES[kind]
    trace = _trace(tmp_path, _config(tmp_path, config), "--batch", "2", "--seq", "32", "--images", "3")
    assert "note" not in capsys.readouterr().err and "3 images a sample" in trace["recorded_with"]
    assert trace["modules"][0]["class_name"] == config["architectures"][0]
    assert {i["name"]: i["shape"] for i in trace["inputs"]} == {
        "input_ids": [2, 32], "pixel_values": [6, 3, 28, 28], "labels": [2, 32],
    }
    graded = {trace["parameters"][e[1]]["fqn"] for e in trace["backwards"][0]["events"] if e[0] == "param_grad"}
    assert all(any(part in fqn for fqn in graded) for part in ("language_model.", "vision", "projector"))
    one = _trace(tmp_path, _config(tmp_path, config), "--batch", "2", "--seq", "32", "--images", "1")
    products = [
        sum(e[4] for e in _operators(t, "forwards") if "vision" in t["modules"][e[2]]["fqn"]) for t in (trace, one)
    ]
    assert products[0] == 3 * products[1] > 0, "of three images, and of one"


@pytest.mark.parametrize(
    "config, images, message",
    [
        (SMALL["llama"], 1, 'LlamaForCausalLM of model type "llama" is none'),
        (SMALL["vit"], 1, 'ViTForImageClassification of model type "vit" is none'),
        (
            OTHER_CONFIGS["no class of the text alone"][0], 1,
            "Qwen2_5_VLForConditionalGeneration does not (give package.module:callable)",
        ),
        (
            OTHER_CONFIGS["a composite type of its own"][0], 1,
            'transformers has neither the model type "own_vl" nor a class',
        ),
        (WITH_IMAGES["llava"], 9, "--images 9 take 36 tokens of each sample, more than --seq 32"),
    ],
)
def test_images_that_a_config_cannot_take_are_a_usage_error(config, images, message, tmp_path, capsys):
    assert (
        cli.main(
            [_config(tmp_path, config), "-q", "--seq", "32", "--images", str(images), "-o", str(tmp_path / "t.json")]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1, error


@pytest.mark.parametrize("kind", OTHER_CONFIGS)
def test_configs_of_other_kinds_trace_and_say_what_is_traced(kind, tmp_path, capsys):
    config, root, said, operator = OTHER_CONFIGS[kind]
    trace = _trace(tmp_path, _config(tmp_path, config), "--seq", "32")
    assert trace["modules"][0]["class_name"] == root and operator in {e[1] for e in _operators(trace, "forwards")}
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trace: note: ")]
    for text in said:
        assert any(text in note for note in notes) and text in trace["recorded_with"]
    graded = {e[1] for e in trace["backwards"][0]["events"] if e[0] == "param_grad"}
    without = {p["fqn"].split(".")[1] for i, p in enumerate(trace["parameters"]) if i not in graded}
    assert without == ({"visual"} if kind == "no class of the text alone" else set())


_MASK_OF_ONES = {
    "architectures": ["BartForConditionalGeneration"],
    "model_type": "bart",
    "d_model": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "vocab_size": 128,
}


def test_a_mask_that_a_model_makes_of_ones_is_read_as_no_padding(tmp_path):
    trace = _trace(tmp_path, _config(tmp_path, _MASK_OF_ONES), "--seq", "32")
    attention = [e[1] for e in _operators(trace, "forwards") if "attention" in e[1]]
    assert attention == ["aten._scaled_dot_product_flash_attention"] * (2 + 2 * 2), "encoder, and both of the decoder's"


# ---- callables ----


def test_a_callable_may_give_only_a_module(tmp_path):
    trace = _trace(tmp_path, "tracer_models:only_a_module", "--batch", "3", "--seq", "5")
    assert trace["inputs"] == [{"name": "args.0", "shape": [3, 5], "dtype": "int64", "storage": 0}]
    assert (
        trace["model"] == "only_a_module"
        and trace["source"] == "tracer_models:only_a_module"
        and trace["tokens_per_batch"] == 15
    )


def test_a_callable_gets_batch_and_seq(tmp_path):
    trace = _trace(
        tmp_path,
        "tracer_models:small_llama",
        "--batch",
        "3",
        "--seq",
        "16",
        "--dtype",
        "bfloat16",
        "--param-dtype",
        "float32",
    )
    assert trace["inputs"][0]["shape"] == [3, 16] and trace["compute_dtype"] == "bfloat16"


def test_a_callable_that_reads_values_is_built_on_real_tensors(tmp_path):
    trace = _trace(tmp_path, "tracer_models:reads_in_constructor")
    assert [p["fqn"] for p in trace["parameters"]] == ["linear.weight", "linear.bias"] and trace["backwards"]


def test_no_loss_traces_the_forward_alone(tmp_path):
    trace = _trace(tmp_path, "tracer_models:no_gradient", "--no-loss")
    assert len(trace["forwards"]) == 1 and "backwards" not in trace


def test_trace_goes_to_standard_output(capsys):
    assert cli.main(["tracer_models:only_a_module", "--seq", "4", "-q", "-o", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "shardplan.trace/1"


def test_progress_is_on_standard_error(tmp_path, capsys):
    assert cli.main(["tracer_models:only_a_module", "--seq", "4", "-o", str(tmp_path / "t.json")]) == 0
    streams = capsys.readouterr()
    assert streams.out == "" and "forward" in streams.err and "backward" in streams.err


# ---- errors ----

BAD_SOURCES = [
    ("nowhere.py", "neither a file nor package.module:callable"),
    ("no_such_package.models:build", 'no module "no_such_package"'),
    ("tracer_models:missing", 'module "tracer_models" has no "missing"'),
    ("tracer_models:a_number", "is a int; expected a callable"),
    ("tracer_models:not_a_module", "returned a list; expected a torch.nn.Module"),
    ("tracer_models:fails_to_build", "failed: KeyError: 'no such size'"),
    ("tracer_models:failing", "its own ValueError: heads do not divide the width"),
    ("tracer_models:reads_values", "reads a value of a tensor"),
    ("tracer_models:no_gradient", "no tensor that needs a gradient"),
    ("tracer_models:two_losses", "found a tensor of shape (2, 4)"),
    ("nowhere.json", "cannot read nowhere.json"),
]


@pytest.mark.parametrize("source, message", BAD_SOURCES)
def test_bad_sources_exit_3_in_one_sentence(source, message, capsys, tmp_path):
    assert cli.main([source, "-q", "--seq", "4", "-o", str(tmp_path / "t.json")]) == 3
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1, error
    assert not (tmp_path / "t.json").exists()


BAD_CONFIGS = [
    ("{", "is not JSON"),
    ([1], "holds a list; expected a JSON object"),
    ({"hidden_size": 4}, 'has no "model_type"'),
    ({"model_type": "llama"}, 'has no "architectures"'),
    ({"model_type": "llama", "architectures": []}, '"architectures" is []'),
    ({"model_type": "llamma", "architectures": ["LlammaForCausalLM"]}, '"llamma" is not known'),
    ({"model_type": "llama", "architectures": [5]}, '"architectures" is [5]'),
    (
        {"model_type": "own", "architectures": ["OwnVL"], "text_config": {"model_type": "llamma"}},
        'nor is model type "llamma" of its "text_config"',
    ),
    (
        {"model_type": "own", "architectures": ["OwnVL"], "text_config": {"model_type": ["llama"]}},
        'nor is model type ["llama"] of its "text_config"',
    ),
    ("null", "holds null"),
    ({**SMALL["llama"], "num_hidden_layers": -2}, '"num_hidden_layers" is -2; expected at least 1'),
    ({**SMALL["gpt2"], "n_layer": 0}, '"n_layer" is 0; expected at least 1'),
    ({**SMALL["llama"], "vocab_size": 0}, '"vocab_size" is 0; expected at least 1'),
    ({**SMALL["llama"], "text_config": {"hidden_size": 4}}, "LlamaForCausalLM cannot be built"),
    ({**SMALL["mixtral"], "num_experts_per_tok": 9}, "the model failed with its own RuntimeError"),
    ({"model_type": "clip", "architectures": ["CLIPModel"]}, "CLIPModel"),
    ({**SMALL["llama"], "num_attention_heads": 7}, "LlamaConfig refuses the config"),
    ({**SMALL["llama"], "hidden_act": "no_such"}, "LlamaForCausalLM cannot be built: "),
    ({"model_type": "llama", "architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification"),
    ({**SMALL["gpt2"], "n_positions": 3}, "sequence 4 is longer than the 3 positions"),
]


@pytest.mark.parametrize("content, message", BAD_CONFIGS)
def test_bad_configs_exit_3_and_say_what_was_expected(content, message, capsys, tmp_path):
    assert cli.main([_config(tmp_path, content), "-q", "--seq", "4", "-o", str(tmp_path / "t.json")]) == 3
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1, error
    assert error.startswith(f"shardplan trace: {tmp_path}"), error


@pytest.mark.parametrize(
    "arguments", [[], ["x:y", "--batch", "0"], ["x:y", "--dtype", "int8"], ["x:y", "--sdpa", "fastest"]]
)
def test_usage_errors_exit_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2 and "usage" in capsys.readouterr().err


def test_a_folder_that_is_not_there_exits_4(capsys, tmp_path):
    assert cli.main(["tracer_models:only_a_module", "-q", "-o", str(tmp_path / "no" / "t.json")]) == 4
    assert "no/t.json: No such file or directory" in capsys.readouterr().err


def test_a_loss_of_configs_is_refused_for_a_callable(capsys, tmp_path):
    assert cli.main(["tracer_models:only_a_module", "-q", "--loss", "model", "-o", str(tmp_path / "t.json")]) == 2
    assert "--loss model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "header, slot",
    [
        (
            "  virtual ~Hooks() = default;\n  virtual bool isBuilt() const {\n  virtual bool "
            "hasPrimaryContext(DeviceIndex i) const = 0;\n",
            3,
        ),
        ("  virtual const Device& device(\n  virtual bool hasPrimaryContext(\n", 1),
        ("  virtual bool isBuilt() const {\n", None),
        (None, None),
    ],
)
def test_the_question_for_a_device_is_found_in_torchs_own_header(tmp_path, header, slot):
    path = tmp_path / fake_cuda._HOOKS_HEADER
    if header is not None:
        path.parent.mkdir(parents=True)
        path.write_text(header)
    if slot is not None:
        assert fake_cuda._slot_of_question(str(tmp_path)) == slot
        return
    with pytest.raises(EnvironmentProblem, match=f"{path.name} is not there, or does not declare"):
        fake_cuda._slot_of_question(str(tmp_path))
