# SPDX-License-Identifier: Apache-2.0
"""A thread copies the weights for a checkpoint, and the next step changes them meanwhile.

    shardplan rehearse --races -- python staged_in_a_thread.py [mended]
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch

mended = "mended" in sys.argv
weights = torch.ones(1 << 20, device="cuda")
staged = torch.empty(1 << 20, pin_memory=True)
stream = torch.cuda.Stream()


def stage(written: torch.cuda.Event) -> None:
    with torch.cuda.stream(stream):
        written.wait()
        staged.copy_(weights, non_blocking=True)
        stream.synchronize()


with ThreadPoolExecutor(1) as pool:
    for _ in range(3):
        written = torch.cuda.Event()
        written.record()
        saving = pool.submit(stage, written)
        if mended:
            saving.result()
        weights.mul_(0.99)
        saving.result()
print("staged", staged.sum().item())
