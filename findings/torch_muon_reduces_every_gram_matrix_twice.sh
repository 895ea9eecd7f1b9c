#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# torch.optim.Muon on FSDP2, a matrix with more rows than columns: each of the five Newton-Schulz iterations all-reduces the same Gram matrix twice, one
# operand of the product at a time. A matrix with more columns than rows is gathered three times in an iteration. So one step of one matrix has 11 or 16
# collectives, each of a whole Gram matrix or a whole matrix, and every rank works on all matrices.
#
# Why: the step is written for whole matrices, and DTensor finds a layout for each operator by itself. Rows of the transpose are columns, so X @ X.T of a
# tall matrix is Partial on every rank. addmm(gram, gram, gram) gets the Partial matrix as two operands, and each of them is redistributed.
# Who meets it: whoever hands fully_shard's parameters to torch.optim.Muon. The results are right; the time is that of the collectives.
#
# Two ranks over Gloo. Installs torch into a temporary folder. Exit code 0: as described; 1: otherwise.
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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


class Collectives(TorchDispatchMode):
    """Those that DTensor issues, with the shape that goes in."""

    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = str(function).split(".")[1]
        if name in COLLECTIVES:
            self.seen[name, tuple(args[0].shape)] += 1
        return function(*args, **(kwargs or {}))


rows, columns = map(int, sys.argv[1:])
dist.init_process_group("gloo")
layer = torch.nn.Linear(columns, rows, bias=False)
fully_shard(layer)
muon = torch.optim.Muon(layer.parameters())
layer(torch.ones(2, columns)).square().sum().backward()
with Collectives() as collectives:
    muon.step()
if dist.get_rank() == 0:
    print(", ".join(f"{count} x {name} of {shape}" for (name, shape), count in sorted(collectives.seen.items())), flush=True)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/python" -c 'import torch; print("torch", torch.__version__)'
failed=0
while IFS='|' read -r rows columns expected; do
  said=$(OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --nproc_per_node 2 "$folder/count.py" "$rows" "$columns" </dev/null 2>/dev/null)
  printf '%s x %s: %s\n' "$rows" "$columns" "$said"
  [ "$said" = "$expected" ] || failed=1
done <<'CASES'
6|4|1 x all_reduce of (), 10 x all_reduce of (4, 4)
4|6|5 x all_gather_into_tensor of (2, 4), 5 x all_gather_into_tensor of (2, 6), 5 x all_gather_into_tensor of (6, 2), 1 x all_reduce of ()
CASES
[ "$failed" -eq 0 ] || { echo "not as described"; exit 1; }
echo "as described"
