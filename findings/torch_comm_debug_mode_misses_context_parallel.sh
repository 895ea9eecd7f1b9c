#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# CommDebugMode, torch's own counter of collectives, finds none in the all-gather of keys and values that context parallelism of flex_attention
# runs, though ranks do exchange them. A gather that is called plainly is counted.
#
# Why: the gather is inside of a custom operator (cplib::flex_cp_allgather), and a dispatch mode sees the operator and not what its code calls. On fake
# tensors its code does not run at all: whatever estimates a step from them sees tensors that grow, and no communication. Who meets it: whoever checks
# a parallel model with CommDebugMode, or estimates memory and time on fake tensors.
#
# Installs torch into a temporary folder, runs two CPU ranks. Exit code 0: as described; 1: otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile torch==2.15.0 numpy
cat >"$folder/count.py" <<'PYTHON'
import torch
import torch.distributed as dist
import torch.distributed.tensor.experimental._context_parallel._attention  # defines the operator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.group.WORLD.group_name
gather = torch.ops.cplib.flex_cp_allgather


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, kinds, args=(), kwargs=None):
        self.seen.append(operator.namespace)
        return operator(*args, **(kwargs or {}))


key = torch.full((1, 1, 2, 4), float(rank))
with CommDebugMode() as inside:
    keys, _ = gather(key, key.clone(), 2, world)
with CommDebugMode() as plain:
    dist.all_gather_into_tensor(torch.empty(4, 4), key.reshape(2, 4))
with FakeTensorMode():
    fake = torch.empty(1, 1, 2, 4)
    with Names() as names:
        shape = tuple(gather(fake, fake, 2, world)[0].shape)
if rank == 0:
    print(f"keys of ranks {sorted(set(keys.flatten().tolist()))}, counted: {inside.get_total_counts()}", flush=True)
    print(f"all_gather_into_tensor, counted: {plain.get_total_counts()}", flush=True)
    print(f"on fake tensors: {shape}, operators of {sorted(set(names.seen))}", flush=True)
dist.destroy_process_group()
PYTHON
cd "$folder"
OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo venv/bin/torchrun --nproc-per-node 2 count.py 2>/dev/null | tee said
venv/bin/python -c 'import torch; print("torch", torch.__version__)'
cat >wanted <<'SAID'
keys of ranks [0.0, 1.0], counted: 0
all_gather_into_tensor, counted: 1
on fake tensors: (1, 1, 4, 4), operators of ['cplib']
SAID
if cmp said wanted; then echo "as described"; else
  echo "CHANGED: not as described"
  exit 1
fi
