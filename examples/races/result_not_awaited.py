# SPDX-License-Identifier: Apache-2.0
"""The main stream reads what a side stream has not written yet.

    shardplan rehearse --races -- python result_not_awaited.py [mended]
"""

import sys

import torch

mended = "mended" in sys.argv
side = torch.cuda.Stream()
done = torch.cuda.Event()
activations = torch.ones(1 << 20, device="cuda")
for _ in range(3):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        norms = activations.square()
        done.record()
    if mended:
        done.wait()
    norms.record_stream(torch.cuda.current_stream())
    total = norms.sum()
torch.cuda.synchronize()
print("total", total.item())
