# SPDX-License-Identifier: Apache-2.0
"""The host reads an offloaded tensor before its copy from the device has ended.

    shardplan rehearse --races -- python offload_read_early.py [mended]
"""

import sys

import torch

mended = "mended" in sys.argv
counts = torch.arange(1 << 10, device="cuda")
on_host = torch.empty(1 << 10, dtype=torch.int64, pin_memory=True)
for _ in range(3):
    counts.add_(1)
    on_host.copy_(counts, non_blocking=True)
    if mended:
        torch.cuda.current_stream().synchronize()
    print(on_host.sum())
