# SPDX-License-Identifier: Apache-2.0
"""A tensor is freed while a side stream still reads it: its memory is handed out again.

    shardplan rehearse --races -- python freed_in_use.py [mended]
"""

import sys

import torch

mended = "mended" in sys.argv
side = torch.cuda.Stream()
total = torch.zeros(1 << 20, device="cuda")
for step in range(3):
    gradient = torch.full((1 << 20,), float(step), device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total.add_(gradient)
    if mended:
        gradient.record_stream(side)
    del gradient
    scratch = torch.zeros(1 << 20, device="cuda")
torch.cuda.synchronize()
print("total", total.sum().item())
