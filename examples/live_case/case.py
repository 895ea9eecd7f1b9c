# SPDX-License-Identifier: Apache-2.0
"""A case for `shardplan conformance --live`: four layers in bfloat16, the second step accumulates."""

import torch
from torch import nn

from shardplan_conformance import Case, Forward


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def _sync(value: bool) -> dict:
    return {"call": "module", "method": "set_requires_gradient_sync", "module": "", "value": value}


def bf16_layers() -> Case:
    update = [{"call": "optimizer_step"}, {"call": "zero_grad"}]
    pair = [{"call": "forward"}, {"call": "backward"}]
    strategy = {
        "policy": "fsdp2",
        "units": [{"modules": ["layers.*"]}, {"modules": [""]}],
        "mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
        "program": [[*pair, *update], [_sync(False), *pair, _sync(True), *pair, *update]],
    }
    return Case(Layers, [Forward((torch.zeros(2, 8),))], strategy, ranks=2, name="bf16_layers")
