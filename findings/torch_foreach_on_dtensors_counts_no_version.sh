#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# torch's foreach operations in place leave the version counters of DTensors as they are. Autograd then does not see that a tensor which a backward needs
# has been changed: it gives wrong gradients where it raises an error for plain tensors, and for the same operation on one DTensor.
#
# Why: the counter of a DTensor is moved by the operator that is called on it. A foreach operator is taken apart below autograd, into operators on local
# tensors, and moves no counter: neither the DTensor's nor that of its local tensor.
# Who meets it: users of FSDP2 and tensor parallelism that change DTensors with torch._foreach_* under no_grad (moving averages, weight decay, clipping by
# torch.nn.utils.clip_grad_norm_, whose default is foreach) while a graph still needs them; and code that tells by `_version` whether a gradient has changed.
#
# One process. Installs torch into a temporary folder. Exit code 0: as described; 1: otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile torch==2.15.0 numpy
cat >"$folder/versions.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))


def gradient(is_dtensor: bool, scale) -> str:
    """Of sum(y * y) with y = x = 1, which is 2, with y changed to 3 before the backward."""
    x = torch.ones(2)
    x = (distribute_tensor(x, mesh, [Replicate()]) if is_dtensor else x).requires_grad_()
    y = x * 1
    loss = (y * y).sum()
    with torch.no_grad():
        scale(y)
    try:
        loss.backward()
    except RuntimeError as error:
        return "error" if "modified by an inplace operation" in str(error) else str(error)
    grad = x.grad.to_local() if is_dtensor else x.grad
    return f"gradient {grad[0].item():g}, version {y._version}"


print("torch", torch.__version__)
found = []
for name, scale in (("foreach", lambda y: torch._foreach_mul_([y], 3.0)), ("single", lambda y: y.mul_(3.0))):
    for is_dtensor in (False, True):
        found.append(gradient(is_dtensor, scale))
        print(f"{name}, {'DTensor' if is_dtensor else 'tensor'}: {found[-1]}")

for foreach in (True, False):
    layer = torch.nn.Linear(8, 8)
    fully_shard(layer, mesh=mesh)
    layer(torch.ones(2, 8)).sum().backward()
    grad = layer.weight.grad
    before = grad._version, grad._local_tensor._version
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e-3, foreach=foreach)
    after = grad._version, grad._local_tensor._version
    found.append("moved" if before != after else "as before")
    print(f"clip_grad_norm_(foreach={foreach}) on FSDP2: versions {found[-1]}")
dist.destroy_process_group()
expected = ["error", "gradient 6, version 0", "error", "error", "as before", "moved"]
print("as described" if found == expected else f"not as described: {found}")
raise SystemExit(found != expected)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/versions.py"
