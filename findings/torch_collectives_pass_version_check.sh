#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A collective of torch.distributed that writes into a tensor is no write for autograd. A tensor that a product has saved for its backward is
# overwritten by all_reduce or broadcast, and the backward computes with the new values. No error is raised. `copy_` of the same
# values raises "modified by an inplace operation".
#
# Why: the schemas of the operators (c10d::allreduce_, c10d::broadcast_, c10d::_allgather_base_ and others) mark none of their arguments as written, so
# the tensor's version stays what it was (unless a backend copies into it, as Gloo's all-gather does). Who meets it: whoever syncs a tensor of the
# forward in place (statistics of a norm, a mask, weights of a loss), and tools that read schemas to find out what an operator writes.
#
# Installs torch into a temporary folder, runs two CPU ranks. Exit code 0: as described; 1: otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile torch==2.15.0 numpy
cat >"$folder/write.py" <<'PYTHON'
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
WRITES = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda x: dist.broadcast(x, 0),
    "copy_": lambda x: x.copy_(torch.full((4,), 5.0)),
}
for name, write in WRITES.items():
    scale = torch.full((4,), rank + 1.0)
    weight = torch.ones(4, requires_grad=True)
    product = (weight * scale).sum()  # its gradient is the scale, as it is now
    version, before = scale._version, scale.clone()
    write(scale)
    try:
        product.backward()
        grad = weight.grad.tolist()
    except RuntimeError as error:
        grad = "refused: " + ("modified by an inplace operation" if "modified by an inplace operation" in str(error) else str(error))
    if rank == 1:
        print(f"{name}: version {version} -> {scale._version}, gradient was to be {before.tolist()}, is {grad}", flush=True)
if rank == 1:
    marked = [name for name in ("allreduce_", "broadcast_", "_allgather_base_") if getattr(torch.ops.c10d, name).default._schema.is_mutable]
    print(f"schemas that say that they write: {len(marked)} of 3", flush=True)
dist.destroy_process_group()
PYTHON
cd "$folder"
OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo venv/bin/torchrun --nproc-per-node 2 write.py 2>/dev/null | tee said
venv/bin/python -c 'import torch; print("torch", torch.__version__)'
cat >wanted <<'SAID'
all_reduce: version 0 -> 0, gradient was to be [2.0, 2.0, 2.0, 2.0], is [3.0, 3.0, 3.0, 3.0]
broadcast: version 0 -> 0, gradient was to be [2.0, 2.0, 2.0, 2.0], is [1.0, 1.0, 1.0, 1.0]
copy_: version 0 -> 1, gradient was to be [2.0, 2.0, 2.0, 2.0], is refused: modified by an inplace operation
schemas that say that they write: 0 of 3
SAID
if cmp said wanted; then echo "as described"; else
  echo "CHANGED: not as described"
  exit 1
fi
