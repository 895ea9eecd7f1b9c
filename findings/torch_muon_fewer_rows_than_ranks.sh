#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# torch.optim.Muon on FSDP2: a matrix with fewer rows than ranks ends the step with an error. A router of 8 experts (8 x hidden) on 16 ranks is one.
# AdamW steps the same parameters.
#
# Why: DTensor replicates the momentum of such a matrix for the Newton-Schulz products, since ranks without a row have nothing to multiply. The
# orthogonalised update stays replicated, and the last line of the step, param.add_(update) in place, has no strategy that keeps the parameter's Shard(0).
# Who meets it: small matrices (routers, low-rank adapters) as soon as the job grows beyond their rows. It works at fewer ranks.
#
# Four ranks over Gloo, matrices of 4, 3 and 2 rows. Installs torch into a temporary folder. Exit code 0: as described; 1: otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile torch==2.15.0 numpy
cat >"$folder/step.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

rows, optimizer = int(sys.argv[1]), getattr(torch.optim, sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
router = torch.nn.Linear(16, rows, bias=False)
fully_shard(router)
optimizer = optimizer(router.parameters(), lr=0.1)
router(torch.ones(2, 16)).square().sum().backward()
try:
    optimizer.step()
    said = "steps"
except RuntimeError as error:
    said = "error: " + str(error).splitlines()[0]
if dist.get_rank() == 0:
    print(said, flush=True)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/python" -c 'import torch; print("torch", torch.__version__)'
failed=0
for case in "4 Muon steps" "3 Muon error" "2 Muon error" "2 AdamW steps"; do
  read -r rows optimizer expected <<<"$case"
  said=$(OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --nproc_per_node 4 "$folder/step.py" "$rows" "$optimizer" 2>/dev/null || true)
  printf '%s rows on 4 ranks, %s: %s\n' "$rows" "$optimizer" "$said"
  [[ $said == $expected* ]] || failed=1
done
[ "$failed" -eq 0 ] || { echo "not as described"; exit 1; }
echo "as described"
