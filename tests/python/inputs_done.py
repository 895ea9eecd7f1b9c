# SPDX-License-Identifier: Apache-2.0
"""An identity around a call's inputs, where FSDP2 has one around a unit's."""

import torch


class InputsDone(torch.autograd.Function):
    """`InputsDone.apply(done, *inputs)` returns the inputs; the backward calls `done` when the gradients of all of them
    are there."""

    @staticmethod
    def forward(ctx, done, *inputs):
        ctx.done = done
        return inputs

    @staticmethod
    def backward(ctx, *gradients):
        ctx.done()
        return (None, *gradients)
