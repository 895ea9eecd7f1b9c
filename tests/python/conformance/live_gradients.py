# SPDX-License-Identifier: Apache-2.0
"""Cases of FSDP2 2.15 about the dtypes of gradients and the moments of their reduction. They have norms and other
parameters in low precision, Tensor.grad_dtype, backwards that the user finalizes, units that a checkpointed function
calls several times, and meshes that replicate alone."""

import itertools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardplan_conformance import Case, Forward

TOKENS = torch.zeros(2, 4, dtype=torch.long)
UNITS = [{"modules": ["blocks.*"]}, {"modules": [""]}]
END = [{"call": "optimizer_step"}, {"call": "zero_grad"}]


class Scaled(nn.Module):
    """Its weight multiplies float32: autograd makes a float32 gradient of it."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.up, self.down = norm(8), nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x).to(x.dtype))))


class Tokens(nn.Module):
    """frozen: so many blocks, and the embedding. in_chunks: a checkpointed function runs the head, once for each chunk.
    headless: it does not run the head."""

    def __init__(self, norm=nn.LayerNorm, dtype=None, grad_dtypes=None, frozen=0, in_chunks=False, headless=False):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(16, 8), nn.ModuleList(Block(norm) for _ in range(3))
        self.norm, self.head, self.in_chunks, self.headless = norm(8), nn.Linear(8, 16), in_chunks, headless
        for module in [self.embed, *self.blocks[:frozen]][: 1 + frozen if frozen else 0]:
            module.requires_grad_(False)
        if dtype:
            self.to(dtype)
        for part, grad_dtype in (grad_dtypes or {}).items():
            for name, parameter in self.named_parameters():
                if part in name:
                    parameter.grad_dtype = grad_dtype

    def of_chunk(self, x):
        return self.head(x).square().mean()

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x).to(x.dtype)
        if self.in_chunks:
            return sum(checkpoint(self.of_chunk, chunk, use_reentrant=False) for chunk in x.chunk(2, dim=1))
        return x if self.headless else self.head(x)


def _total(output):
    return output.float().sum()


def _sync(value: bool) -> dict:
    return {"call": "module", "method": "set_requires_gradient_sync", "module": "", "value": value}


def _micro(number: int) -> list[dict]:
    return [{"call": "forward", "microbatch": number}, {"call": "backward", "microbatches": [number]}]


ACCUMULATES = {"program": [[_sync(False), *_micro(0), _sync(True), *_micro(1), *END]]}
FINALIZE = {"call": "module", "method": "finalize_backward", "module": ""}


def _case(name: str, model=None, ranks: int = 2, **strategy) -> Case:
    given = {"policy": "fsdp2", "units": UNITS, "optimizer": {"kind": "sgd"}, **strategy}
    return Case(lambda: Tokens(**(model or {})), [Forward((TOKENS,))], given, ranks, loss=_total, name=name)


def _norms() -> list[Case]:
    """Norms, biases and embeddings by reduce dtype, in the low precision and kept in their own."""
    found = []
    for norm in (nn.LayerNorm, nn.RMSNorm, Scaled):
        for reduce in (None, "float32", "bfloat16"):
            for keeps in (False, True):
                mixed = {"param_dtype": "bfloat16", **({"reduce_dtype": reduce} if reduce else {})}
                if keeps:
                    mixed["keep_param_dtype"] = ["blocks.*.norm.*", "norm.*"]
                name = f"{norm.__name__.lower()}_reduced_in_{reduce or 'none'}{'_kept' if keeps else ''}"
                found.append(_case(name, {"norm": norm}, mixed_precision=mixed, **ACCUMULATES))
    return found


def _grad_dtypes() -> list[Case]:
    dtypes = {
        "norms": {"norm": torch.float32}, "all": {"": torch.float32}, "any": {"norm": None},
        "three": {"norm": torch.float32, "up": torch.float16},
    }
    found = []
    for name, grad_dtypes in dtypes.items():
        model = {"norm": Scaled, "dtype": torch.bfloat16, "grad_dtypes": grad_dtypes}
        found.append(_case(f"grad_dtypes_{name}", model, **ACCUMULATES))
        found.append(
            _case(f"grad_dtypes_{name}_reduced_in_float32", model, mixed_precision={"reduce_dtype": "float32"})
        )
    hybrid = [{"name": "replicate", "size": 2}, {"name": "shard", "size": 2}]
    return [
        *found,
        _case(
            "grad_dtypes_replicas",
            {"norm": Scaled, "dtype": torch.bfloat16, "grad_dtypes": dtypes["norms"]},
            ranks=4,
            mesh=hybrid,
        ),
    ]


def _finalized_by_hand() -> list[Case]:
    manual = {"setup": [{"method": "set_manual_backward_finalization", "module": "", "value": True}]}
    programs = {
        "sync_in_last": [_sync(False), *_micro(0), _sync(True), *_micro(1), FINALIZE, *END],
        "sync_at_the_end": [_sync(False), *_micro(0), *_micro(1), _sync(True), FINALIZE, *END],
        "twice": [_sync(False), *_micro(0), FINALIZE, _sync(True), *_micro(1), FINALIZE, *END],
    }
    return [
        _case(f"by_hand_{name}_frozen_{frozen}", {"frozen": frozen}, program=[program], **manual)
        for name, program in programs.items()
        for frozen in (0, 1, 2)
    ]


def _in_chunks() -> list[Case]:
    units = [{"modules": ["blocks.*"]}, {"modules": ["head"]}, {"modules": [""]}]
    low = {"mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
    return [
        _case(f"checkpointed_chunks{name}", {"in_chunks": True}, units=units, **fields)
        for name, fields in {
            "": {}, "_low": low, "_kept": {"reshard_after_forward": False}, "_accumulate": ACCUMULATES,
        }.items()
    ]


def _heads_apart() -> list[Case]:
    """The loss runs the head on chunks of what the model returned, each with a backward of its own, before the
    model's."""
    chunk = torch.zeros(2, 2, 8, requires_grad=True)
    head = lambda number: [
        {"call": "forward", "microbatch": number, "trace": 1},
        {"call": "backward", "microbatches": [number]},
    ]  # noqa: E731
    of_head = lambda method, value: {
        "call": "module", "method": method, "module": "head", "value": value, "recurse": False,
    }  # noqa: E731
    body = [{"call": "forward", "microbatch": 0}], [{"call": "backward", "microbatches": [0]}]
    first, last = of_head("set_requires_gradient_sync", False), of_head("set_requires_gradient_sync", True)
    kept = [of_head("set_reshard_after_forward", False), of_head("set_reshard_after_backward", False)]
    freed = [of_head("set_reshard_after_forward", True), of_head("set_reshard_after_backward", True)]
    programs = {
        "": [*body[0], *head(1), *head(2), *body[1], *END],
        "_synced_once": [*body[0], first, *head(1), last, *head(2), *body[1], *END],
        "_kept": [*body[0], *kept, first, *head(1), last, *head(2), *freed, *body[1], *END],
    }
    alone = [{"modules": ["blocks.*"]}, {"modules": ["head"]}, {"modules": [""]}]
    grouped = [{"modules": ["blocks.*"]}, {"modules": ["norm", "head"], "group": True}, {"modules": [""]}]
    found = []
    for units, how in ((alone, ""), (grouped, "_grouped")):
        for name, program in programs.items():
            strategy = {"policy": "fsdp2", "units": units, "optimizer": {"kind": "sgd"}, "program": [program]}
            forwards = [Forward((TOKENS,)), Forward((chunk,), module="head")]
            found.append(
                Case(lambda: Tokens(headless=True), forwards, strategy, 2, loss=_total, name=f"head_apart{how}{name}")
            )
    return found


def _replicated() -> list[Case]:
    mesh = [{"name": "outer", "size": 2}, {"name": "inner", "size": 2}, {"name": "one", "size": 1}]
    over = {"parameters": ["blocks.*.norm.*"], "data_parallel": {"shard": ["one"], "replicate": ["outer", "inner"]}}
    units = [{"modules": ["blocks.*"], "parameter_meshes": [over]}, {"modules": [""]}]
    return [
        _case(
            f"norms_replicated{name}", ranks=4, mesh=mesh, data_parallel={"shard": ["outer", "inner"]}, units=units,
            **fields,
        )
        for name, fields in {"": {}, "_kept": {"reshard_after_forward": False}, "_accumulate": ACCUMULATES}.items()
    ]


RESET = {"call": "module", "method": "reset_iter_state", "module": ""}


def _raised() -> list[Case]:
    """A pass raises in its middle, the state is reset, and the step begins again."""
    settings = {
        "": {},
        "_kept": {"reshard_after_forward": False},
        "_low": {"mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}},
        "_lists": {"fsdp2": {"forward_prefetch": 1, "backward_prefetch": 2}},
        "_replicas": {"mesh": [{"name": "replicate", "size": 2}, {"name": "shard", "size": 2}]},
    }
    plain, accumulates = [*_micro(0), *END], ACCUMULATES["program"][0]
    places = itertools.cycle(("blocks.1", "blocks.1.up", "head"))
    found = []
    for (name, fields), backward, waits in itertools.product(settings.items(), (False, True), (False, True)):
        if waits and name not in ("", "_low", "_replicas"):
            continue
        where, again = next(places), accumulates if waits else plain
        raises = {"raises_in_backward" if backward else "raises_in": where}
        fails = [
            {"call": "forward", "microbatch": 0, "trace": 1},
            *([{"call": "backward", "microbatches": [0]}] if backward else []),
            RESET,
        ]
        before = [_sync(False), *_micro(0)] if waits else []
        strategy = {
            "policy": "fsdp2", "units": UNITS, "optimizer": {"kind": "sgd"},
            "program": [again, [*before, *fails, *again], again], **fields,
        }
        called = f"raised_in_{'backward_of_' if backward else ''}{where}{name}{'_accumulates' if waits else ''}"
        forwards = [Forward((TOKENS,)), Forward((TOKENS,), **raises)]
        found.append(Case(Tokens, forwards, strategy, 4 if name == "_replicas" else 2, loss=_total, name=called))
    return found


def cases() -> list[Case]:
    """Cases of PyTorch 2.15."""
    return [
        *_raised(), *_norms(), *_grad_dtypes(), *_finalized_by_hand(), *_in_chunks(), *_heads_apart(), *_replicated(),
    ]
