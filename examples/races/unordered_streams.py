# SPDX-License-Identifier: Apache-2.0
"""Work of a side stream reads what the main stream has not written yet.

    shardplan rehearse --races -- python unordered_streams.py [mended]
"""

import sys

import torch

mended = "mended" in sys.argv
side = torch.cuda.Stream()
weights = torch.empty(1 << 20, device="cuda")
for step in range(3):
    weights.fill_(step)
    if mended:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        doubled = weights * 2
    torch.cuda.current_stream().wait_stream(side)
    doubled.record_stream(torch.cuda.current_stream())
    total = doubled.sum()
print("total", total.item())
