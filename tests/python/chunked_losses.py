# SPDX-License-Identifier: Apache-2.0
"""A model without its head, and a loss whose gradient is there already: what losses in chunks are made of."""

import torch
from torch import nn


class GivenGradient(torch.autograd.Function):
    """A loss whose gradient of the hidden states is there already."""

    @staticmethod
    def forward(ctx, hidden, gradient, loss):
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx, outer):
        return ctx.saved_tensors[0] * outer, None, None


class Body(nn.Module):
    """The loss calls its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(8, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x
