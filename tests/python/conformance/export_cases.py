# SPDX-License-Identifier: Apache-2.0
"""Strategies whose plans are exported as plain FSDP2 calls, on a model of blocks between two layers."""

from __future__ import annotations

import os

import torch
from live_cases import LAYERS, LOW, Block
from torch import nn

from shardplan_conformance import Case, Forward

PAIR = [{"call": "forward"}, {"call": "backward"}]
END = [{"call": "optimizer_step"}, {"call": "zero_grad"}]
HSDP = [{"name": "replicate", "size": 2}, {"name": "shard", "size": 2}]
OUTER_INNER = [{"name": "outer", "size": 2}, {"name": "inner", "size": 2}]
OVER_BOTH, OVER_OUTER = {"shard": ["outer", "inner"]}, {"shard": ["outer"]}


def _on_meshes(*rules: tuple[list[str], dict]) -> list[dict]:
    """Blocks, some of whose parameters are on meshes of their own, as experts are."""
    meshes = [{"parameters": names, "data_parallel": ranks} for names, ranks in rules]
    return [{"modules": ["layers.*"], "parameter_meshes": meshes}, *LAYERS[1:]]


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.layers, self.head = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _set(method: str, value, module: str = "", **more) -> dict:
    return {"call": "module", "method": method, "module": module, "value": value, **more}


def _micro(number: int) -> list[dict]:
    return [{"call": "forward", "microbatch": number}, {"call": "backward", "microbatches": [number]}]


ACCUMULATES = [
    _set("set_requires_gradient_sync", False), *_micro(0), _set("set_requires_gradient_sync", True), *_micro(1), *END,
]
KEEPS_OVER = [
    _set("set_reshard_after_backward", False, "layers.1", recurse=False),
    *_micro(0),
    _set("set_reshard_after_backward", True, "layers.1", recurse=False),
    *_micro(1),
    *END,
]
# Calls before forwards, backwards and the optimizer, and at the step's end.
EVERYWHERE = [
    _set("unshard", True, "layers.2"),
    {"call": "forward", "microbatch": 0},
    {"call": "module", "method": "wait_for_unshard", "module": "layers.2"},
    _set("set_requires_gradient_sync", False, "layers.0", recurse=False),
    {"call": "backward", "microbatches": [0]},
    _set("set_requires_gradient_sync", True),
    {"call": "forward", "microbatch": 1},
    _set("set_reshard_after_backward", False, "layers.3"),
    {"call": "backward", "microbatches": [1]},
    {"call": "module", "method": "reshard", "module": "layers.3"},
    {"call": "optimizer_step"},
    {"call": "zero_grad"},
    _set("set_reshard_after_backward", True, "layers.3"),
]

# Name -> (ranks, strategy).
STRATEGIES: dict[str, tuple[int, dict]] = {
    "default": (2, {}),
    "keeps": (2, {"units": [{"modules": ["layers.2", "layers.3"], "reshard_after_forward": False}, *LAYERS[1:]]}),
    "keeps_a_part": (4, {"reshard_after_forward": 2}),
    "precision": (
        2,
        {
            "mixed_precision": LOW,
            "units": [LAYERS[0], {"modules": [""], "mixed_precision": LOW | {"output_dtype": "float32"}}],
        },
    ),
    "precision_by_unit": (
        2,
        {
            "units": [
                {"modules": ["layers.1"], "mixed_precision": LOW | {"output_dtype": "float32"}},
                {"modules": ["layers.2"]},
                LAYERS[1],
            ]
        },
    ),
    "groups": (
        2,
        {
            "units": [
                {"modules": ["layers.0", "layers.1"], "group": True},
                {"modules": ["layers.2", "head"], "group": True},
                LAYERS[1],
            ]
        },
    ),
    "classes": (2, {"units": [{"modules": ["class:Block"]}, {"modules": ["head"]}, LAYERS[1]]}),
    "hsdp": (4, {"mesh": HSDP}),
    "flattened": (4, {"mesh": OUTER_INNER, "data_parallel": OVER_BOTH}),
    "ranks_by_unit": (
        4,
        {
            "mesh": OUTER_INNER,
            "data_parallel": OVER_BOTH,
            "units": [
                {"modules": ["layers.1", "layers.2"], "data_parallel": {"shard": ["inner"], "replicate": ["outer"]}},
                {"modules": ["layers.0"]},
                LAYERS[1],
            ],
        },
    ),
    "parameter_meshes": (
        4,
        {
            "mesh": OUTER_INNER,
            "data_parallel": OVER_BOTH,
            "units": _on_meshes((["layers.*.down.*", "layers.0.up.weight"], OVER_OUTER)),
        },
    ),
    "parameter_meshes_of_some": (
        4,
        {
            "mesh": OUTER_INNER,
            "data_parallel": OVER_BOTH,
            "units": _on_meshes(
                (["layers.1.down.weight", "layers.2.down.weight"], {"shard": ["inner"], "replicate": ["outer"]}),
                (["layers.3.norm.weight", "layers.3.up.weight"], OVER_OUTER),
            ),
            "fsdp2": {"shard_dims": [{"parameters": ["layers.2.down.weight"], "dim": 1}]},
            "mixed_precision": LOW,
        },
    ),
    "prefetches": (2, {"fsdp2": {"forward_prefetch": 2, "backward_prefetch": 2}}),
    "prefetch_lists": (
        2,
        {
            "fsdp2": {
                "forward_prefetch_lists": [{"unit": "layers.0", "prefetch": ["layers.1", "layers.3"]}],
                "backward_prefetch_lists": [{"unit": "layers.3", "prefetch": ["layers.1"]}],
            }
        },
    ),
    "in_flight": (2, {"fsdp2": {"reduce_scatter_inputs_in_flight": 3, "separate_reduce_scatter_communicator": True}}),
    "factors": (2, {"fsdp2": {"gradient_divide_factor": 3.0, "force_sum_reduction": True}}),
    "no_root": (
        2,
        {
            "units": [{"modules": ["layers.0"]}, {"modules": ["layers.3"]}],
            "fsdp2": {"shard_root": False, "shared_comm_contexts": [["layers.*"]]},
        },
    ),
    "shard_dims": (2, {"fsdp2": {"shard_dims": [{"parameters": ["layers.*.up.weight"], "dim": 1}]}}),
    "ignores": (2, {"ignored_parameters": ["layers.1.norm.weight", "head.bias"]}),
    "offloads": (2, {"cpu_offload": True, "pin_memory": False, "mixed_precision": LOW}),
    "recomputes": (2, {"checkpoint": {"modules": ["layers.*"]}}),
    "recomputes_children": (2, {"checkpoint": {"modules": ["layers.0.up", "layers.1", "layers.2.down"]}}),
    "recomputes_every_second": (
        2,
        {
            "checkpoint": {"modules": ["class:Block"], "every": 2, "save": [{"name": "aten.mm", "recompute_every": 2}]},
            "units": [{"modules": ["class:Block"]}, LAYERS[1]],
        },
    ),
    "accumulates": (2, {"program": [ACCUMULATES]}),
    "keeps_over": (2, {"program": [KEEPS_OVER]}),
    "calls_everywhere": (2, {"program": [EVERYWHERE]}),
    "setup": (
        2,
        {"setup": [{"method": "set_reshard_after_forward", "module": "layers.0", "value": False, "recurse": False}]},
    ),
    "calls": (2, {"program": [[_set("unshard", True, "layers.0"), *PAIR, *END]]}),
}


def exported_case(name: str, apply: str | os.PathLike = "", strategy: dict | None = None) -> Case:
    ranks, more = STRATEGIES.get(name, (2, {}))
    given = strategy if strategy is not None else {"units": LAYERS, **more, "policy": "fsdp2"}
    return Case(Blocks, [Forward((torch.zeros(3, 8),))], given, ranks=ranks, name=name, apply=apply)
