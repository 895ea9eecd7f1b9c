#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A functional collective (and so each of DTensor) returns at once on real tensors, and is waited for where its result is first used. Under a
# FakeTensorMode the same code waits for it before it returns. On fake tensors nothing seems to overlap.
#
# Why: torch takes a FakeTensorMode for a compiler that traces, and returns no tensor that waits by itself then. Who meets it: whoever records a
# parallel model on fake tensors to estimate how much of its communication is hidden.
#
# Installs torch into a temporary folder. Exit code 0: as described; 1: otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile torch==2.15.0 numpy
cat >"$folder/order.py" <<'PYTHON'
import contextlib

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, kinds, args=(), kwargs=None):
        if functional.AsyncCollectiveTensor in kinds:
            return NotImplemented  # it waits, and calls the operator again
        name = operator._overloadpacket.__name__
        if name in ("all_reduce", "wait_tensor", "mm", "add"):
            self.seen.append(name)
        return operator(*args, **(kwargs or {}))


for what, mode in (("real", contextlib.nullcontext()), ("fake", FakeTensorMode())):
    with mode:
        x = torch.ones(4, 4)
        with Names() as names:
            total = functional.all_reduce(x, "sum", dist.group.WORLD)
            product = x @ x
            product + total
    print(f"{what} tensors: {' '.join(names.seen)}")
PYTHON
cd "$folder"
venv/bin/python -W ignore order.py 2>/dev/null | tee said
venv/bin/python -c 'import torch; print("torch", torch.__version__)'
cat >wanted <<'SAID'
real tensors: all_reduce mm wait_tensor add
fake tensors: all_reduce wait_tensor mm add
SAID
if cmp said wanted; then echo "as described"; else
  echo "CHANGED: not as described"
  exit 1
fi
