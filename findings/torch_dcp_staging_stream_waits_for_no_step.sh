#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# torch.distributed.checkpoint's DefaultStager with use_async_staging and use_non_blocking_copy (its own defaults, and torchtitan's
# async_with_pinned_mem): weights are copied on a stream of the stager that waits for nothing. An optimizer's step that is issued and not over is copied
# half done. The checkpoint then has numbers of two steps. Waiting for staging_completion before the next step does not help.
#
# Why: DefaultStager._stage (torch/distributed/checkpoint/staging.py) makes its stream current in its thread, copies, and synchronizes that stream.
# It never waits for the stream that was current where stage() was called. Streams of torch's pool do not wait for the default stream by themselves.
# Who meets it: an async_save behind optimizer.step() without a synchronize or an .item() in between. Pinning may hide it at the first save.
#
# Traced here: async_save on the CPU, with a stream that says what it is asked for. Installs torch into a temporary folder. Exit code 0: as described;
# 1: otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile torch==2.15.0 numpy
cat >"$folder/trace.py" <<'PYTHON'
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

warnings.simplefilter("ignore")
said = []


class Stream:  # stands for the stream of an accelerator: it says what it is asked for
    def __enter__(self):
        said.append("the staging stream becomes current")

    def __exit__(self, *_):
        said.append("the staging stream is no longer current")

    def __getattr__(self, name):
        return lambda *_, **__: said.append(f"staging stream: {name}")


def says(owner, name):
    setattr(owner, name, lambda *_, **__: said.append(f"{owner.__name__}.{name}") or Stream())


copy = torch.UntypedStorage.copy_


def copy_(self, source, non_blocking=None):
    said.append(f"  copy of {source.nbytes()} bytes, non_blocking={non_blocking}")
    return copy(self, source, non_blocking)


torch.accelerator.is_available = lambda: True
torch.Stream = Stream
for name in ("synchronize", "current_stream"):
    says(torch.accelerator, name)
    says(torch.cuda, name)
torch.UntypedStorage.copy_ = copy_

weight = torch.zeros(8)
weight.add_(1)  # the optimizer's step, on the current stream
stager = DefaultStager(
    StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=True)
)
with tempfile.TemporaryDirectory() as folder:
    response = dcp.async_save({"weight": weight}, checkpoint_id=folder, async_stager=stager, no_dist=True)
    response.staging_completion.result()
    response.upload_completion.result()
stager.close()
print("\n".join(said))
PYTHON
cd "$folder"
venv/bin/python -W ignore trace.py 2>/dev/null | tee said
venv/bin/python -c 'import torch; print("torch", torch.__version__)'
cat >wanted <<'SAID'
the staging stream becomes current
  copy of 32 bytes, non_blocking=True
the staging stream is no longer current
staging stream: synchronize
SAID
if cmp said wanted; then echo "as described"; else
  echo "CHANGED: not as described"
  exit 1
fi
