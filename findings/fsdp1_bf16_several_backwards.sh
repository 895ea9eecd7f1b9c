#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# FullyShardedDataParallel with param_dtype=bfloat16: of a unit that a step calls several times, each call with a backward of its own (a loss
# in chunks), the gradient of the first call alone arrives. In float32 all arrive. Nothing is said.
#
# Why: the hook that reduces hangs on the gradient accumulation of the flat parameter, and is registered once until the root's backward has ended.
# Each unshard that changes the dtype gives the flat parameter another accumulation, which has no hook.
#
# Installs torch into a temporary folder, trains nothing but one step on two CPU ranks. Exit code 0: as described; 1: otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile torch==2.15.0 numpy
cat >"$folder/step.py" <<'PYTHON'
import copy
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision

warnings.simplefilter("ignore")
dist.init_process_group("gloo")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.body(x)


def step(model, head, x):
    hidden = model(x)
    leaf = hidden.detach().requires_grad_()
    for chunk in leaf.chunk(4):
        head(chunk).float().square().mean().backward()
    hidden.backward(leaf.grad)


def norm(parameters):
    total = sum(p.grad.float().square().sum() for p in parameters if p.grad is not None)
    dist.all_reduce(total)
    return total.sqrt().item()


for dtype in (torch.float32, torch.bfloat16):
    torch.manual_seed(0)
    plain = Model()
    sharded = copy.deepcopy(plain)
    precision = MixedPrecision(param_dtype=dtype)
    sharded.head = FSDP(sharded.head, mixed_precision=precision, device_id=torch.device("cpu"))
    sharded = FSDP(sharded, mixed_precision=precision, device_id=torch.device("cpu"))
    x = torch.randn(8, 8)
    step(plain, plain.head, x)
    step(sharded, sharded.module.head, x)
    wanted = sum(p.grad.square().sum() for p in plain.head.parameters()).sqrt().item()
    got = norm(sharded.module.head.parameters())
    if dist.get_rank() == 0:
        print(f"{str(dtype):15} norm of the head's gradient: FSDP {got:.4f}, one process {wanted:.4f}, ratio {got / wanted:.2f}", flush=True)
dist.destroy_process_group()
PYTHON
cd "$folder"
OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo venv/bin/torchrun --nproc-per-node 2 step.py 2>/dev/null | tee said
venv/bin/python - <<'PYTHON'
import re
import sys

import torch

print("torch", torch.__version__)
ratios = [float(ratio) for ratio in re.findall(r"ratio ([0-9.]+)", open("said").read())]
as_described = len(ratios) == 2 and abs(ratios[0] - 1) < 0.02 and ratios[1] < 0.6
print("as described" if as_described else "CHANGED: not as described")
sys.exit(0 if as_described else 1)
PYTHON
