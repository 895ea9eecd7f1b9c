#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# With PyPI's torch 2.15 the Gloo backend has all_to_all, for parts of one size alone: lists whose tensors have different numbers of rows are an error,
# although every rank sends what the other one expects. all_to_all_single exchanges the same parts, given as split sizes. NCCL takes both.
#
# An expert-parallel model that exchanges tokens with a list (spmd_types does, under torchtitan 0.3.0's default backend) trains on CPU ranks only while each
# expert gets the same number of tokens.
#
# Installs torch into a temporary folder. Exit code 0: as described; 1: otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/exchange.py" <<'PYTHON'
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank(number: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    sent, got = ([1, 3], [1, 2]) if number == 0 else ([2, 2], [3, 2])  # rows to, and from, each rank
    sent, got = [torch.full((rows, 4), float(number)) for rows in sent], [torch.empty(rows, 4) for rows in got]
    single = torch.empty(sum(len(part) for part in got), 4)
    dist.all_to_all_single(single, torch.cat(sent), [len(part) for part in got], [len(part) for part in sent])
    try:
        dist.all_to_all(got, sent)
        said = "exchanges them"
    except RuntimeError as error:
        said = "raises " + str(error).splitlines()[0]
    if number == 0:
        right = single[:, 0].tolist() == [0.0, 1.0, 1.0]
        print(f"torch {torch.__version__.split('+')[0]}, gloo: all_to_all_single {'exchanges' if right else 'mixes up'} unequal parts, all_to_all {said}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank, (sys.argv[1],), nprocs=2)
PYTHON
python3 -m venv "$folder/torch"
"$folder/torch/bin/pip" install --quiet --disable-pip-version-check --no-compile "torch==2.15.0" numpy
GLOO_SOCKET_IFNAME=lo "$folder/torch/bin/python" -W ignore "$folder/exchange.py" "$folder" | tee "$folder/said"
if grep -q 'all_to_all_single exchanges unequal parts, all_to_all raises .*invalid tensor size' "$folder/said"; then echo "as described"; else
  echo "otherwise"
  exit 1
fi
