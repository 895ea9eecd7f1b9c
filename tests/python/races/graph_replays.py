# SPDX-License-Identifier: Apache-2.0
"""A step in a CUDA graph, as torch's documentation has it: graph_replays.py [early], which fills the next input before
the replay has read the last one."""

import sys

import torch

model = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, target = torch.zeros(8, 64, device="cuda"), torch.zeros(8, 64, device="cuda")
batch = torch.ones(8, 64, device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.mse_loss(model(inputs), target).backward()
        optimizer.step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    loss = torch.nn.functional.mse_loss(model(inputs), target)
    loss.backward()
    optimizer.step()
filling = side if "early" in sys.argv else torch.cuda.current_stream()
side.wait_stream(torch.cuda.current_stream())
for _ in range(3):
    with torch.cuda.stream(filling):
        inputs.copy_(batch)
    torch.cuda.current_stream().wait_stream(filling)
    graph.replay()
print(loss.item())
