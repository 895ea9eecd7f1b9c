# SPDX-License-Identifier: Apache-2.0
"""Cases of knobs that random ones do not draw: tensor and expert parallelism, extensions, calls between steps."""

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from shardplan_conformance import Case, Forward

LAYERS = [{"modules": ["layers.*"]}, {"modules": [""]}]
LOW = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.layers = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Buffers(Blocks):
    """With buffers of floating point in every block."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.register_buffer("offset", torch.zeros(8))

    def forward(self, x):
        return super().forward(x) + sum(layer.offset for layer in self.layers)


class Experts(nn.Module):
    """Every rank has a part of the experts' weights, and mixes what these make."""

    def __init__(self):
        super().__init__()
        self.router, self.weight = nn.Linear(8, 8), nn.Parameter(torch.zeros(4, 8, 8))

    def forward(self, x):
        weight = self.weight.to_local() if hasattr(self.weight, "to_local") else self.weight
        return self.router(x) + torch.einsum("bsd,edf->bsf", x, weight)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def _tensor_parallel(model, mesh) -> None:
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], plan)


def _expert_parallel(model, mesh) -> None:
    for layer in model.layers:
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh["expert"], [Shard(0)]))


def _mesh(**sizes) -> list[dict]:
    return [{"name": name, "size": size} for name, size in sizes.items()]


def _case(name: str, model=Blocks, parallelize=None, ranks: int = 4, **strategy) -> Case:
    x = torch.zeros(2, 4, 8)
    return Case(
        model,
        [Forward((x,))],
        {"policy": "fsdp2", "units": LAYERS, **strategy},
        ranks,
        parallelize=parallelize,
        name=name,
    )


def _flat_case(name: str, model=Blocks, ranks: int = 2, program=None, fsdp1=None, **strategy) -> Case:
    """Without gradients: the second forward of the case."""
    x = torch.zeros(2, 4, 8)
    given = {
        "policy": "fsdp1", "units": LAYERS, "fsdp1": fsdp1 or {}, **({"program": program} if program else {}),
        **strategy,
    }
    return Case(model, [Forward((x,)), Forward((x,), grad=False)], given, ranks, name=f"flat_{name}")


def _call(method: str, module: str, value: bool | None = None) -> dict:
    return {"call": "module", "method": method, "module": module, **({} if value is None else {"value": value})}


_STEP = [{"call": call} for call in ("forward", "backward", "optimizer_step", "zero_grad")]


def _summoned(*modules: str, **more) -> list[dict]:
    entered = [{**_call("summon_full_params", module, True), **more} for module in modules]
    return [*entered, *({**call, "value": False} for call in reversed(entered)), *_STEP]


def _flat_cases() -> list[Case]:
    evaluated = [{"call": "forward", "microbatch": 9, "trace": 1}, *_STEP]
    original = {"use_orig_params": True}
    low = {"param_dtype": "bfloat16", "buffer_dtype": "bfloat16"}
    return [
        _flat_case("optimizer_in_backward", fsdp1=original, optimizer={"kind": "sgd", "in_backward": True}),
        _flat_case("order_validated", fsdp1={"validate_execution_order": True}),
        _flat_case("size_based_wrap", units=[], fsdp1={"size_based_wrap": {"min_num_params": 100}}),
        _flat_case("hook", fsdp1={"comm_hook": "bf16_compress_hook"}, ranks=3),
        _flat_case("offload", cpu_offload=True, mixed_precision={"param_dtype": "bfloat16"}),
        _flat_case(
            "buffers", Buffers, program=[evaluated], fsdp1={"full_precision_in_eval": True}, mixed_precision=low
        ),
        _flat_case("summon", program=[_summoned("")], mixed_precision=LOW),
        _flat_case(
            "summon_module", program=[_STEP, _summoned("layers.1", "layers.0")], fsdp1={"sharding": "shard_grad_op"}
        ),
        _flat_case(
            "summon_gradients",
            program=[[*_STEP[:2], *_summoned("", flags=["with_grads"])[:2], *_STEP[2:]]],
            fsdp1=original,
            mixed_precision=LOW,
        ),
        _flat_case("summon_rank_0", program=[_summoned("", flags=["rank0_only", "writeback"])]),
        _flat_case("summon_alone", program=[_summoned("", recurse=False)], fsdp1=original),
    ]


def cases() -> list[Case]:
    tp, ep = _tensor_parallel, _expert_parallel
    flat = {"shard": ["outer", "inner"]}
    scaled = [
        {"parameters": ["layers.*.up.weight"], "gathered": [{"dtype": "bfloat16"}, {"dtype": "float32", "numel": 1}]}
    ]
    apart = [
        {"parameters": ["layers.*.up.weight"], "gathered": [{"dtype": "uint8"}], "unsharded": [{"dtype": "float32"}]}
    ]
    keep = _call("set_reshard_after_backward", "", False)
    return [
        _case("tp", parallelize=tp, mesh=_mesh(shard=2, tensor=2)),
        _case(
            "tp_low_precision",
            parallelize=tp,
            mesh=_mesh(shard=2, tensor=2),
            mixed_precision=LOW,
            reshard_after_forward=False,
        ),
        _case("tp_outermost", parallelize=tp, mesh=_mesh(tensor=2, shard=2), cpu_offload=True),
        _case("tp_replicas", parallelize=tp, mesh=_mesh(replicate=2, shard=1, tensor=2)),
        _case("one_replica", ranks=2, mesh=_mesh(replicate=1, shard=2), mixed_precision=LOW),
        _case(
            "one_replica_accumulates",
            ranks=2,
            mesh=_mesh(replicate=1, shard=2),
            program=[
                [
                    _call("set_requires_all_reduce", "", False), *_STEP[:2], _call("set_requires_all_reduce", "", True),
                    *_STEP,
                ]
            ],
        ),
        _case(
            "one_replica_flattened",
            ranks=2,
            mesh=_mesh(replicate=1, outer=2, inner=1),
            data_parallel={"shard": ["outer", "inner"], "replicate": ["replicate"]},
        ),
        _case(
            "shared_contexts_by_pattern",
            ranks=2,
            units=[{"modules": ["stem"]}, *LAYERS[:1]],
            fsdp2={"shard_root": False, "shared_comm_contexts": [["stem", "layers.*"]]},
        ),
        _case(
            "tp_second_dimension",
            parallelize=tp,
            mesh=_mesh(shard=2, tensor=2),
            fsdp2={"shard_dims": [{"parameters": ["*.*.up.weight"], "dim": 1}]},
        ),
        _case("ep", Mixture, ep, mesh=_mesh(shard=2, expert=2)),
        _case(
            "ep_experts_apart",
            Mixture,
            ep,
            mesh=_mesh(outer=2, expert=2),
            units=[
                {"modules": ["layers.*.router"]},
                {"modules": ["layers.*"], "data_parallel": {"shard": ["outer"]}},
                {"modules": [""]},
            ],
            data_parallel={"shard": ["outer", "expert"]},
        ),
        _case("flattened", mesh=_mesh(outer=2, inner=2), data_parallel=flat, fsdp2={"forward_prefetch": 1}),
        _case("extension", ranks=2, mixed_precision=LOW, fsdp2={"extensions": scaled}),
        _case("extension_other_size", ranks=2, fsdp2={"extensions": apart}),
        _case("no_root", ranks=2, units=[{"modules": ["stem"]}, *LAYERS[:1]], fsdp2={"shard_root": False}),
        _case(
            "shared_contexts",
            ranks=2,
            units=[{"modules": ["stem"]}, *LAYERS[:1]],
            fsdp2={"shard_root": False, "shared_comm_contexts": [["stem", "layers.0", "layers.2"]]},
        ),
        _case(
            "state_dict_between_steps",
            ranks=2,
            program=[[keep, _call("state_dict", ""), *_STEP], [_call("load_state_dict", "layers.1"), *_STEP]],
        ),
        _case(
            "wait_for_unshard",
            ranks=2,
            program=[[_call("unshard", "layers.1", True), _call("wait_for_unshard", "layers.1"), *_STEP]],
        ),
        _case("divide_factor", ranks=2, fsdp2={"gradient_divide_factor": 3.0}),
        *_flat_cases(),
        _case(
            "optimizer_in_backward",
            mesh=_mesh(replicate=2, shard=2),
            mixed_precision=LOW,
            optimizer={"kind": "adamw", "in_backward": True},
        ),
    ]
