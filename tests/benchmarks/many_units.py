# SPDX-License-Identifier: Apache-2.0
"""A deep model of tiny units: host time is all there is to measure."""

from __future__ import annotations

import torch
import torch.nn as nn

UNITS, WIDTH, BATCH = 100, 16, 2


class Block(nn.Module):
    """Six parameters, as a unit of a small transformer layer has about as many."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class ManyUnits(nn.Module):
    def __init__(self, units: int = UNITS, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(units))
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def traced():
    """The callable for `shardplan trace many_units:traced`."""
    return ManyUnits(), torch.randn(BATCH, WIDTH), torch.sum
