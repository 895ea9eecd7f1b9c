# SPDX-License-Identifier: Apache-2.0
"""The units that the installed frameworks make, by their own code on one CPU rank: each as (FQNs of its parameters,
reshard_after_forward). A process of its own, for the imports and the process group: `framework_units.py
FRAMEWORK:POLICY:MODEL[:first_step] ...` prints a line of JSON for each: {"case", "units"}, or "error" in their place.
`framework_units.py --traces FOLDER MODEL ...` writes a trace of each, by the tracer's command. MODEL is one of
MODELS."""

import json
import os
import sys
import types
import warnings

import torch
import transformers
from torch import nn


def llama(tied=False):
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64)
    )


def phi():
    config = transformers.PhiConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    return transformers.PhiForCausalLM(config)


def t5():
    config = transformers.T5Config(
        d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=64, tie_word_embeddings=True
    )
    return transformers.T5ForConditionalGeneration(config), {
        "input_ids": torch.zeros(1, 8, dtype=torch.long),
        "decoder_input_ids": torch.zeros(1, 8, dtype=torch.long),
    }


def mixtral():
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, num_local_experts=4,
    )
    return transformers.MixtralForCausalLM(config)


def bert():
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
        max_position_embeddings=64,
    )
    return transformers.BertForMaskedLM(config)


def lora(**more):
    import peft

    return peft.get_peft_model(
        llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **more)
    )


def lora_saved():
    return lora(modules_to_save=["lm_head"])


def prompts():
    import peft

    return peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


class TitanDecoder(nn.Module):
    """Laid out as torchtitan's decoders are: torchtitan/models/common/decoder.py."""

    def __init__(self, tied=False):
        super().__init__()
        self.enable_weight_tying = tied
        self.tok_embeddings = nn.Embedding(64, 32)
        self.layers = nn.ModuleDict({str(i): nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for i in range(3)})
        self.norm = nn.LayerNorm(32)
        self.lm_head = nn.Linear(32, 64, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x))


MODELS = {
    "llama": llama,
    "llama_tied": lambda: llama(True),
    "gpt2": gpt2,
    "phi": phi,
    "t5": t5,
    "mixtral": mixtral,
    "bert": bert,
    "lora": lora,
    "lora_saved": lora_saved,
    "prompts": prompts,
    "titan": TitanDecoder,
    "titan_tied": lambda: TitanDecoder(True),
}


def module_of(name):
    made = MODELS[name]()
    return made[0] if isinstance(made, tuple) else made


_CHECKPOINTED = "_checkpoint_wrapped_module."


def fsdp2_units(model):
    from torch.distributed.fsdp import FSDPModule

    names = {module: name for name, module in model.named_modules()}
    groups = {}  # a unit of several modules has one, which each of them names
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                groups[id(group)] = group
    found = []
    for group in groups.values():
        parameters = sorted(
            f"{names[p._module_info.module]}.{p._module_info.param_name}".lstrip(".").replace(_CHECKPOINTED, "")
            for p in group.fsdp_params
        )
        # FSDP2 decides reshard_after_forward=None of the root before the first forward: false.
        found.append((parameters, group.post_forward_mesh_info is not None and model not in group.modules))
    return sorted(found)


def fsdp1_units(model):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    names = {module: name for name, module in model.named_modules()}
    found = []
    for module in FSDP.fsdp_modules(model):
        if module._flat_param is not None:
            fqns = (
                f"{names[module]}.{fqn}".replace("_fsdp_wrapped_module", "").strip(".")
                for fqn in module._flat_param._fqns
            )
            found.append((sorted(fqn.replace("..", ".") for fqn in fqns), None))
    return sorted(found)


def with_accelerate(model, policy, plugin_options):
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2 if policy == "fsdp2" else 1, cpu_ram_efficient_loading=False, **plugin_options
    )
    if policy == "fsdp2":
        from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model

        state = types.SimpleNamespace(fsdp_plugin=plugin)
        # The parts of an Accelerator that the function asks for; a real one would want an accelerator.
        job = types.SimpleNamespace(
            state=state, torch_device_mesh=None, mixed_precision="no", is_main_process=True, device=torch.device("cpu")
        )
        if plugin.activation_checkpointing:
            model = fsdp2_apply_ac(job, model)
        return fsdp2_units(fsdp2_prepare_model(job, model))
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    plugin.set_auto_wrap_policy(model)
    # Units of frozen and trained parameters need original ones; without them ties of two units are two parameters, as
    # plans have it.
    frozen = any(not p.requires_grad for p in model.parameters())
    return fsdp1_units(
        FSDP(model, auto_wrap_policy=plugin.auto_wrap_policy, device_id=torch.device("cpu"), use_orig_params=frozen)
    )


def by_hand(model, policy):
    """The loop of README.md and of PyTorch's tutorials: each layer, then the rest."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import fully_shard

    layers = model.model.layers
    if policy == "fsdp2":
        for layer in layers:
            fully_shard(layer)
        return fsdp2_units(fully_shard(model))
    for number, layer in enumerate(layers):
        layers[number] = FSDP(layer, device_id=torch.device("cpu"))
    return fsdp1_units(FSDP(model, device_id=torch.device("cpu")))


def units_of(framework, policy, name, first_step=""):
    model = module_of(name)
    if framework == "by_hand":
        return by_hand(model, policy)
    if framework == "accelerate":
        units = with_accelerate(model, policy, {"auto_wrap_policy": "transformer_based_wrap"})
    elif framework == "accelerate_checkpoints":
        options = {"auto_wrap_policy": "transformer_based_wrap", "activation_checkpointing": True}
        units = with_accelerate(model, policy, options)
    elif framework == "peft":
        from peft.utils.other import fsdp_auto_wrap_policy

        units = with_accelerate(model, policy, {"auto_wrap_policy": fsdp_auto_wrap_policy(model)})
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torchtitan.distributed import fsdp as titan

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
        common = (mesh, torch.bfloat16, torch.float32, False)
        if name.startswith("titan"):
            titan.apply_fsdp_to_decoder(model, *common)
        else:
            titan_backend()(View(model), *common)
        units = fsdp2_units(model)
    if first_step:  # ties are looked for before the first forward
        model._get_fsdp_state()._lazy_init()
    return units


def main(*cases):
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "ACCELERATE_USE_FSDP": "true"}
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for case in cases:
        before = dict(os.environ)  # frameworks say things to themselves there
        try:
            found = {"units": units_of(*case.split(":"))}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        os.environ.clear()
        os.environ |= before
        print(json.dumps({"case": case, **found}), flush=True)


def write_traces(folder, *names):
    from shardplan.tracer import cli

    for name in names:
        code = cli.main(
            [f"framework_units:trace_{name}", "-o", f"{folder}/{name}.json", "-q", "--loss", "sum", "--seq", "8"]
        )
        if code != 0:
            sys.exit(code)


class View(nn.Module):
    """HFTransformerModel's properties over the model that it wraps."""

    def __init__(self, model):
        super().__init__()
        self.model, inner = model, model.model
        object.__setattr__(self, "tok_embeddings", inner.embed_tokens)
        object.__setattr__(self, "layers", inner.layers)
        object.__setattr__(self, "norm", getattr(inner, "norm", None) or inner.final_layernorm)
        object.__setattr__(self, "lm_head", model.lm_head)


def titan_backend():
    """apply_fsdp of torchtitan's backend for transformers, without what its module imports."""
    import ast
    import importlib.util

    path = (
        importlib.util.find_spec("torchtitan").submodule_search_locations[0]
        + "/experiments/transformers_modeling_backend/parallelize.py"
    )
    tree = ast.parse(open(path).read())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "apply_fsdp"]
    from typing import Any

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard
    from torchtitan.distributed.fsdp import (
        disable_fsdp_gradient_division, enable_fsdp_symm_mem, get_fsdp_reshard_after_forward_policy,
    )

    scope = {k: v for k, v in locals().items() if k not in ("tree", "path", "ast", "importlib")} | {
        "torch": torch,
        "nn": nn,
    }
    exec(compile(tree, path, "exec"), scope)
    return scope["apply_fsdp"]


# `shardplan trace framework_units:trace_NAME`.
def _traced(name):
    def make(batch=1, seq=8):
        made = MODELS[name]()
        tokens = torch.zeros(batch, seq, dtype=torch.long)
        return made if isinstance(made, tuple) else (made, (tokens,))

    return make


for _name in MODELS:
    globals()[f"trace_{_name}"] = _traced(_name)

if __name__ == "__main__":
    write_traces(*sys.argv[2:]) if sys.argv[1] == "--traces" else main(*sys.argv[1:])
