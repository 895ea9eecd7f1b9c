# SPDX-License-Identifier: Apache-2.0
"""The models that a plan and real FSDP2 both train (equivalence.py). Each has awkward sizes: first dimensions that the
ranks do not divide, one-dimensional parameters, ties, parts that are used twice or not at all."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

ROOT = pathlib.Path(__file__).resolve().parents[3]
for folder in (ROOT / "examples" / "train_gpt", ROOT / "tools" / "python"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import model as gpt  # noqa: E402

BATCH, SEQUENCE = 2, 8


@dataclasses.dataclass(frozen=True)
class Model:
    """build(**arguments) -> module; inputs(generator) -> keyword or positional arguments of a forward."""

    build: Callable[..., nn.Module]
    inputs: Callable[[torch.Generator], tuple | dict]


def loss_of(output) -> torch.Tensor:
    """A scalar that every element of the (first floating-point) output contributes to, whatever the output is."""
    for name in ("logits", "last_hidden_state"):
        if hasattr(output, name):
            output = getattr(output, name)
    if isinstance(output, dict) and "head" in output:
        return sum(loss_of(output["head"](chunk)) for chunk in output["hidden"].chunk(2))
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        return sum(loss_of(item) for item in output)
    logits = output.float()
    return logits.logsumexp(-1).mean() + 0.5 * logits.square().mean()


# ---- small models, each with something peculiar ----


class Mlp(nn.Module):
    """`layers` residual blocks of two Linears between a stem and a head.

    used_twice: a block that runs again at the end. in_a_row: one that runs twice in a row. unused: blocks that never
    run. outputs: the head's output alone ("tensor"), with the hidden state ("tuple") or in a dict, or none of it: the
    loss runs the head on chunks of the hidden state ("chunks"). frozen: prefixes of FQNs that need no gradient.
    by_method: blocks of which another method than forward runs, too. boxed: blocks hand each other a dataclass. norm:
    of the blocks, one of NORMS. dtype: of all parameters. grad_dtypes: Tensor.grad_dtype of those whose FQN has such a
    part. outputs may be "checkpointed_chunks" as well: a checkpointed function runs the head, once for each chunk.
    """

    def __init__(
        self,
        layers: int = 3,
        width: int = 10,
        hidden: int = 13,
        bias: bool = True,
        used_twice: int | None = None,
        in_a_row: int | None = None,
        unused: tuple[int, ...] = (),
        outputs: str = "tensor",
        frozen: tuple[str, ...] = (),
        tied: bool = False,
        bare_root: bool = False,
        recomputed: tuple[int, ...] = (),
        by_method: tuple[int, ...] = (),
        boxed: bool = False,
        norm: str = "layer",
        dtype: str | None = None,
        grad_dtypes: dict[str, str | None] | None = None,
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(7, width, bias=bias)
        self.layers = nn.ModuleList(Layer(width, hidden, bias, norm) for _ in range(layers))
        self.head = nn.Linear(width, 7, bias=bias)
        self.scale = None if bare_root else nn.Parameter(torch.full((width,), 1.25))
        if tied:
            self.layers[-1].up.weight = self.layers[0].up.weight
        self.used_twice, self.unused, self.outputs, self.recomputed = used_twice, unused, outputs, recomputed
        self.in_a_row, self.by_method, self.boxed = in_a_row, by_method, boxed
        for name, parameter in self.named_parameters():
            if any(name.startswith(prefix) for prefix in frozen):
                parameter.requires_grad_(False)
        self.dtype = getattr(torch, dtype) if dtype else None
        self.to(self.dtype)
        for part, grad_dtype in (grad_dtypes or {}).items():
            for name, parameter in self.named_parameters():
                if part in name:
                    parameter.grad_dtype = grad_dtype and getattr(torch, grad_dtype)

    def of_chunk(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).square().mean()

    def forward(self, x: torch.Tensor):
        x = self.stem(x if self.dtype is None else x.to(self.dtype))
        if self.scale is not None:
            x = x * self.scale
        x = Box(x) if self.boxed else x
        for index, layer in enumerate(self.layers):
            if index in self.unused:
                continue
            x = checkpoint(layer, x, use_reentrant=False) if index in self.recomputed else layer(x)
            if index == self.in_a_row:
                x = layer(x)
            if index in self.by_method:
                x = layer.encode(x)
        if self.used_twice is not None:
            x = self.layers[self.used_twice](x)
        x = x.hidden if self.boxed else x
        if self.outputs == "checkpointed_chunks":
            return torch.stack([checkpoint(self.of_chunk, chunk, use_reentrant=False) for chunk in x.chunk(2)])
        if self.outputs == "chunks":
            return {"hidden": x, "head": self.head}
        y = self.head(x)
        return {"tensor": y, "tuple": (y, x), "dict": {"y": y, "nested": [x]}}[self.outputs]


@dataclasses.dataclass
class Box:
    hidden: torch.Tensor
    says: str = "nothing"


class Scaled(nn.Module):
    """Its weight multiplies float32, whatever it is in: autograd makes a float32 gradient of it, with any kernels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


NORMS: dict[str, Callable[[int, bool], nn.Module]] = {
    "layer": lambda width, bias: nn.LayerNorm(width, bias=bias),
    "rms": lambda width, _: nn.RMSNorm(width),
    "scaled": lambda width, _: Scaled(width),
}


class Layer(nn.Module):
    forward_method = "encode"

    def __init__(self, width: int, hidden: int, bias: bool = True, norm: str = "layer") -> None:
        super().__init__()
        self.norm = NORMS[norm](width, bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: torch.Tensor | Box) -> torch.Tensor | Box:
        if isinstance(x, Box):
            return Box(x.hidden + self.down(F.gelu(self.up(self.norm(x.hidden)))))
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.down(self.up(self.norm(x)).tanh())


def register_forward_methods(model: nn.Module, register: Callable[[nn.Module, str], None]) -> None:
    """register(module, method) for every module that may be run by another method than forward."""
    for module in list(model.modules()):
        if hasattr(module, "_checkpoint_wrapped_module"):
            continue  # it has the attributes of the module in it, which comes next
        if name := getattr(module, "forward_method", None):
            register(module, name)


def build_gpt(frozen: tuple[str, ...] = (), **config) -> nn.Module:
    model = gpt.Gpt(gpt.GptConfig(**config))
    for name, parameter in model.named_parameters():
        if any(name.startswith(prefix) for prefix in frozen):
            parameter.requires_grad_(False)
    return model


def floats(*shape: int) -> Callable[[torch.Generator], tuple]:
    return lambda generator: (torch.randn(*shape, generator=generator),)


def ids(vocabulary: int) -> Callable[[torch.Generator], tuple]:
    return lambda generator: (torch.randint(vocabulary, (BATCH, SEQUENCE), generator=generator),)


# ---- families of transformers, with tiny configurations ----


def build_llama(layers: int = 2, **config) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            use_cache=False,
            **config,
        )
    )


def build_moe(layers: int = 2, **config) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=53,
            hidden_size=24,
            intermediate_size=36,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=32,
            use_cache=False,
            output_router_logits=False,
            **config,
        )
    )
    model.set_experts_implementation("batched_mm")  # which a trace can follow, in any dtype
    return model


def build_t5(layers: int = 2, **config) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=59,
            d_model=20,
            d_kv=5,
            d_ff=33,
            num_layers=layers,
            num_heads=4,
            relative_attention_num_buckets=9,
            dropout_rate=0.0,
            use_cache=False,
            **config,
        )
    )


def build_vit(layers: int = 2, **config) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=28,
            intermediate_size=45,
            num_hidden_layers=layers,
            num_attention_heads=4,
            image_size=16,
            patch_size=8,
            num_labels=5,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **config,
        )
    )


def _t5_inputs(generator: torch.Generator) -> dict:
    draw = functools.partial(torch.randint, 59, (BATCH, SEQUENCE), generator=generator)
    return {"input_ids": draw(), "decoder_input_ids": draw()}


def _hf_ids(vocabulary: int) -> Callable[[torch.Generator], dict]:
    return lambda generator: {"input_ids": torch.randint(vocabulary, (BATCH, SEQUENCE), generator=generator)}


MODELS = {
    "mlp": Model(Mlp, floats(BATCH, 7)),
    "gpt": Model(build_gpt, ids(97)),
    "llama": Model(build_llama, _hf_ids(61)),
    "moe": Model(build_moe, _hf_ids(53)),
    "t5": Model(build_t5, _t5_inputs),
    "vit": Model(build_vit, lambda generator: {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator)}),
}
# The units of each: its repeated blocks.
BLOCKS = {
    "mlp": "layers.*",
    "gpt": "blocks.*",
    "llama": "model.layers.*",
    "moe": "model.layers.*",
    "t5": "class:T5Block",
    "vit": "class:ViTLayer",
}


def build(name: str, arguments: dict | None = None, seed: int = 7) -> nn.Module:
    """The same values on every rank and in every run."""
    torch.manual_seed(seed)
    return MODELS[name].build(**(arguments or {}))


def inputs_of(name: str, seed: int) -> tuple[tuple, dict]:
    """(args, kwargs) of one forward."""
    made = MODELS[name].inputs(torch.Generator().manual_seed(seed))
    return ((), made) if isinstance(made, dict) else (made, {})
