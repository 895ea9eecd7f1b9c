# SPDX-License-Identifier: Apache-2.0
"""The host fills a pinned buffer with the next batch while the copy of the last one still reads it.

    shardplan rehearse --races -- python pinned_overwritten.py [mended]
"""

import sys

import torch

mended = "mended" in sys.argv
staging = torch.empty(1 << 16, dtype=torch.int64, pin_memory=True)
copied = torch.cuda.Event()
total = torch.zeros((), dtype=torch.int64, device="cuda")
for step in range(3):
    if mended:
        copied.synchronize()
    staging.fill_(step)
    batch = staging.to("cuda", non_blocking=True)
    copied.record()
    total += batch.sum()
print("total", total.item())
