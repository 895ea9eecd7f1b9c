#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# torch.optim.Muon on FSDP2 with replicas (HSDP): each Newton-Schulz iteration of a matrix with more rows than columns also all-reduces among replicas, although
# every replica has the same gradients and momenta and needs nothing of the others. 13 of 24 collectives of a step are among replicas.
#
# Why: DTensor looks for the cheapest layout of each product, and cutting a replicated operand over the replicas costs nothing by its estimates: no bytes move.
# The products are then partial sums over replicas, too, and Gram matrices are reduced over shards and over replicas, one after the other.
# Who meets it: HSDP jobs. Replicas are what lies across nodes, so the traffic that HSDP keeps inside of a node leaves it in each iteration. A Llama of 8B on
# 64 H100 takes longer for its optimizer with 8 replicas of 8 shards than with 64 shards.
#
# Four ranks over Gloo. Installs torch into a temporary folder. Exit code 0: as described; 1: otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile torch==2.15.0 numpy
cat >"$folder/count.py" <<'PYTHON'
import collections
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


class Collectives(TorchDispatchMode):
    """Those that DTensor issues, by the dimension of the mesh that they are along."""

    def __init__(self, mesh):
        super().__init__()
        self.names = {mesh.get_group(name).group_name: name for name in mesh.mesh_dim_names}
        self.seen = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if str(function).split(".")[1] in COLLECTIVES:
            group = args[-1] if isinstance(args[-1], str) else args[-1].group_name
            self.seen[self.names[group]] += 1
        return function(*args, **(kwargs or {}))


replicas, rows, columns = map(int, sys.argv[1:])
dist.init_process_group("gloo")
sizes, names = ((4,), ("shard",)) if replicas == 1 else ((replicas, 4 // replicas), ("replicate", "shard"))
mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
layer = torch.nn.Linear(columns, rows, bias=False)
fully_shard(layer, mesh=mesh)
muon = torch.optim.Muon(layer.parameters())
layer(torch.ones(2, columns)).square().sum().backward()
with Collectives(mesh) as collectives:
    muon.step()
if dist.get_rank() == 0:
    print(", ".join(f"{count} along {name}" for name, count in sorted(collectives.seen.items())), flush=True)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/python" -c 'import torch; print("torch", torch.__version__)'
failed=0
while IFS='|' read -r replicas rows columns expected; do
  said=$(OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo "$folder/venv/bin/torchrun" --nproc_per_node 4 "$folder/count.py" "$replicas" "$rows" "$columns" </dev/null 2>/dev/null)
  printf '%s x %s, %s replicas: %s\n' "$rows" "$columns" "$replicas" "$said"
  [ "$said" = "$expected" ] || failed=1
done <<'CASES'
1|6|4|11 along shard
2|6|4|13 along replicate, 11 along shard
CASES
[ "$failed" -eq 0 ] || { echo "not as described"; exit 1; }
echo "as described"
