# SPDX-License-Identifier: Apache-2.0
"""The models of the recordings in tests/conformance/fsdp2 and fsdp1, built again, and their cases as
shardplan_conformance.Case."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch import nn

from shardplan_conformance import Case, Forward

RECORDINGS = Path(__file__).resolve().parents[2] / "conformance"


class Attention(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        return self.proj(functional.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), is_causal=True))


class FeedForward(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.fc, self.proj = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.proj(functional.gelu(self.fc(x)))


class Block(nn.Module):
    def __init__(self, dim: int = 32):
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(dim), Attention(dim)
        self.ln2, self.mlp = nn.LayerNorm(dim), FeedForward(dim)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    """`order`: in which the blocks run."""

    def __init__(self, tied: bool = True, freeze=(), n: int = 4, order=None):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(96, 32), nn.Embedding(8, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(n))
        self.ln_f, self.lm_head = nn.LayerNorm(32), nn.Linear(32, 96, bias=False)
        self.order = order or range(n)
        if tied:
            self.lm_head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(freeze)))

    def forward(self, x):
        x = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for index in self.order:
            x = self.blocks[index](x)
        return self.lm_head(self.ln_f(x))


class Linear2(nn.Module):
    def __init__(self, into: int, out: int):
        super().__init__()
        self.lin = nn.Linear(into, out)

    def forward(self, x):
        return functional.relu(self.lin(x))


class Layers(nn.Module):
    def __init__(self, *sizes: int, head: int = 0):
        super().__init__()
        self.layers = nn.ModuleList(Linear2(a, b) for a, b in zip(sizes, sizes[1:]))
        if head:
            self.head = nn.Linear(sizes[-1], head)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x) if hasattr(self, "head") else x


class Branchy(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = Linear2(24, 24)
        self.branches = nn.ModuleDict({name: Linear2(24, 24) for name in "abcd"})
        self.head = nn.Linear(24, 24)

    def forward(self, x, use):
        x = self.stem(x)
        for name in use:
            x = x + self.branches[name](x)
        return self.head(x)


def llama(vocab: int = 96, ffn: int = 64, **more):
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = 4
    sizes = {"hidden_size": 32, "intermediate_size": ffn, "vocab_size": vocab, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False, **more))


MODELS2 = {
    "gptish": Gpt,
    "frozen": Gpt,
    "reused": Gpt,
    "mlp3": lambda: Layers(16, 32, 48, 16),
    "uneven": lambda: Layers(10, 7, 4, 2, 11, head=5),
    "branchy": Branchy,
}


def fsdp2_case(name: str) -> Case | None:
    """None: a model that is not built here."""
    path = RECORDINGS / "fsdp2" / f"{name}.json"
    document = json.loads((path if path.exists() else RECORDINGS / "fsdp2_215" / path.name).read_text())
    make = MODELS2.get(document["model"])
    if make is None:
        return None
    described = document["batch"]["x"]
    x = torch.zeros(described["shape"], dtype=getattr(torch, described["dtype"]))
    forwards: list[Forward] = []
    program = [[_fsdp2_call(call, x, forwards) for call in step] for step in document["program"]]
    setup, knobs = _fsdp2_setup(document["setup"])
    strategy: dict = {
        "policy": "fsdp2",
        "mesh": [{"name": n, "size": s} for n, s in zip(document["mesh"]["dims"], document["mesh"]["shape"])],
        "units": [_fsdp2_unit(call) for call in document["fully_shard_calls"]],
        "fsdp2": knobs,
        "optimizer": {"kind": "sgd"},
        "setup": setup,
        "program": program,
    }
    if document["checkpoint"]["checkpoint_wrapper_on"]:
        strategy["checkpoint"] = {"modules": document["checkpoint"]["checkpoint_wrapper_on"]}
    arguments = document["model_args"]
    return Case(lambda: make(**arguments), forwards, strategy, ranks=document["world_size"], name=name)


def _fsdp2_call(call: dict, x: torch.Tensor, forwards: list[Forward]) -> dict:
    op = call["op"]
    if op in ("forward", "eval_forward"):
        wanted = Forward((x,), call.get("kwargs", {}), grad=op == "forward")
        same = [i for i, f in enumerate(forwards) if f.kwargs == wanted.kwargs and f.grad == wanted.grad]
        if not same:
            forwards.append(wanted)
        return {"call": "forward", "microbatch": call["mb"], "trace": same[0] if same else len(forwards) - 1}
    if op == "backward":
        return {"call": "backward", "microbatches": call["mbs"]}
    if op in ("optim_step", "zero_grad"):
        return {"call": "optimizer_step" if op == "optim_step" else op}
    value = call.get("value", call.get("async_op", False))
    return {"call": "module", "method": op, "module": call.get("module", ""), "value": value}


def _fsdp2_setup(calls: list[dict]) -> tuple[list[dict], dict]:
    setup, knobs = [], {}
    for call in calls:
        op = call["op"]
        if op.startswith("set_modules_to_"):
            lists = knobs.setdefault(f"{'forward' if 'forward' in op else 'backward'}_prefetch_lists", [])
            lists.append({"unit": call["module"], "prefetch": call["targets"]})
        elif op == "set_gradient_divide_factor":
            knobs["gradient_divide_factor"] = call["value"]
        elif op == "set_force_sum_reduction_for_comms":
            knobs["force_sum_reduction"] = call["value"]
        else:
            setup.append({"method": op, "module": call["module"], "value": call["value"]})
    return setup, knobs


def _fsdp2_unit(call: dict) -> dict:
    unit: dict = {"modules": call["modules"], "group": len(call["modules"]) > 1}
    if call["reshard_after_forward"] is not None:
        unit["reshard_after_forward"] = call["reshard_after_forward"]
    if call["mp_policy"]:
        names = ("param_dtype", "reduce_dtype")
        unit["mixed_precision"] = {n: call["mp_policy"][n] for n in names if call["mp_policy"].get(n)}
    if call["cpu_offload"]:
        unit["cpu_offload"] = True
    return unit


# ---- FSDP1: other sizes and names ----


class Block1(nn.Module):
    def __init__(self, dim: int = 32):
        super().__init__()
        self.ln1, self.qkv, self.proj = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ln2, self.fc1, self.fc2 = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        x = x + self.proj(functional.scaled_dot_product_attention(*self.qkv(self.ln1(x)).chunk(3, -1), is_causal=True))
        return x + self.fc2(functional.gelu(self.fc1(self.ln2(x))))


class Gpt1(nn.Module):
    def __init__(self, blocks: int = 4, seq=None, frozen=()):
        super().__init__()
        self.tok, self.pos = nn.Embedding(61, 32), nn.Embedding(8, 32)
        self.blocks = nn.ModuleList(Block1() for _ in range(blocks))
        self.ln_f, self.head = nn.LayerNorm(32), nn.Linear(32, 61, bias=False)
        self.head.weight = self.tok.weight
        self.seq = seq or range(blocks)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def forward(self, x):
        x = self.tok(x) + self.pos(torch.arange(x.shape[1], device=x.device))
        for index in self.seq:
            x = self.blocks[index](x)
        return self.head(self.ln_f(x))


def _perceptron() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)))


class Uneven1(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(7, 13)
        self.l0 = nn.Sequential(nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 13))
        self.l1 = nn.Sequential(nn.Linear(13, 5, bias=False), nn.Tanh(), nn.Linear(5, 13))
        self.l2 = nn.Sequential(nn.LayerNorm(13), nn.Linear(13, 1))

    def forward(self, x):
        return self.l2(self.l1(self.l0(self.inp(x))))


def fsdp1_case(name: str) -> Case | None:
    """None: a model or a setting that is not built here."""
    document = json.loads((RECORDINGS / "fsdp1" / f"{name}.json").read_text())
    settings, model = document["settings"], document["model"]
    if model in ("branchy", "llama_tiny") or settings["optim_in_backward"]:
        return None
    if "reentrant" in (settings["activation_checkpointing"] or ""):
        return None
    parameters = document["model_description"]["parameters"]
    frozen = [p["fqn"] for p in parameters if not p["requires_grad"]]
    seq = document["model_opts"].get("seq")
    if model == "mlp3":
        make, x = _perceptron, torch.zeros(2, 16)
    elif model == "uneven":
        make, x = Uneven1, torch.zeros(3, 7)
    else:
        make, x = lambda: Gpt1(3 if seq else 4, seq, frozen), torch.zeros(2, 8, dtype=torch.long)
    strategy = _fsdp1_strategy(document, [p["fqn"] for p in parameters])
    return Case(make, [Forward((x,)), Forward((x,), grad=False)], strategy, ranks=document["world_size"], name=name)


def _fsdp1_strategy(document: dict, parameters: list[str]) -> dict:
    settings = document["settings"]
    units = ["" if unit["fqn"] == "(root)" else unit["fqn"] for unit in document["units"]]
    strategy: dict = {
        "policy": "fsdp1",
        "units": [{"modules": [fqn]} for fqn in sorted(units, key=lambda fqn: fqn == "")],
        "fsdp1": {
            "sharding": settings["strategy"].lower().lstrip("_"),
            "backward_prefetch": (settings["backward_prefetch"] or "none").lower(),
            "forward_prefetch": settings["forward_prefetch"],
            "limit_all_gathers": settings["limit_all_gathers"],
            "use_orig_params": settings["use_orig_params"],
        },
        "cpu_offload": settings["cpu_offload"],
        "optimizer": {"kind": "sgd"},
        "program": [_fsdp1_step(step) for step in document["steps"]],
    }
    if len(document["mesh"]["shape"]) == 2:
        names = ("replicate", "shard")
        strategy["mesh"] = [{"name": n, "size": s} for n, s in zip(names, document["mesh"]["shape"])]
    if mixed := settings["mixed_precision"]:
        strategy["mixed_precision"] = {k: v for k, v in mixed.items() if v}
    if settings["activation_checkpointing"]:
        strategy["checkpoint"] = {"modules": [unit["fqn"] for unit in document["units"] if unit["checkpointed"]]}
    ignored = tuple(module + "." for module in settings["ignored_modules"])
    if ignored:
        strategy["ignored_parameters"] = [fqn for fqn in parameters if fqn.startswith(ignored)]
    return strategy


def _fsdp1_step(step: list[dict]) -> list[dict]:
    calls, no_sync = [], False
    for call in step:
        if call["call"] in ("forward", "backward") and call.get("no_sync", False) != no_sync:
            no_sync = not no_sync
            calls.append({"call": "module", "method": "no_sync", "module": "", "value": no_sync})
        if call["call"] == "forward":
            calls.append({"call": "forward", "microbatch": call.get("mb", 0), "trace": int(call["mode"] != "train")})
        elif call["call"] == "backward":
            calls.append({"call": "backward", "microbatches": [call.get("mb", 0)]})
        else:
            calls.append({"call": "optimizer_step" if call["call"] == "optim_step" else "zero_grad"})
    return calls
