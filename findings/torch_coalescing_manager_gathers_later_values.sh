#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Inside of torch.distributed._coalescing_manager all_gather_into_tensor, reduce_scatter_tensor and all_reduce do nothing until the block ends. What is
# written into their inputs in between is what is sent. A broadcast in the same block runs where it stands, so it overtakes them.
#
# Nothing is said of it. Python keeps them back, before any backend sees them. Who meets it: whoever reuses one staging buffer for several gathers in a
# block, or matches the order of collectives of two programs, one of which coalesces.
#
# Installs torch into a temporary folder, runs two CPU ranks. Exit code 0: as described; 1: otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile torch==2.15.0 numpy
cat >"$folder/gather.py" <<'PYTHON'
import contextlib

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

dist.init_process_group("gloo")
rank = dist.get_rank()


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, kinds, args=(), kwargs=None):
        if operator.namespace == "c10d":
            self.seen.append(operator._overloadpacket.__name__)
        return operator(*args, **(kwargs or {}))


for what, block in (("one by one", contextlib.nullcontext), ("coalesced", dist._coalescing_manager)):
    staging, flag = torch.empty(1), torch.ones(1)
    first, second = torch.empty(2), torch.empty(2)
    with Names() as names, block():
        dist.all_gather_into_tensor(first, staging.fill_(rank + 1.0))
        dist.all_gather_into_tensor(second, staging.fill_(rank + 11.0))
        dist.broadcast(flag, 0)
    if rank == 0:
        print(f"{what}: gathered {first.tolist()} and {second.tolist()}; issued {' '.join(names.seen)}", flush=True)
dist.destroy_process_group()
PYTHON
cd "$folder"
OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo venv/bin/torchrun --nproc-per-node 2 gather.py 2>/dev/null | tee said
venv/bin/python -c 'import torch; print("torch", torch.__version__)'
cat >wanted <<'SAID'
one by one: gathered [1.0, 2.0] and [11.0, 12.0]; issued _allgather_base_ _allgather_base_ broadcast_
coalesced: gathered [11.0, 12.0] and [11.0, 12.0]; issued broadcast_ allgather_into_tensor_coalesced_
SAID
if cmp said wanted; then echo "as described"; else
  echo "CHANGED: not as described"
  exit 1
fi
