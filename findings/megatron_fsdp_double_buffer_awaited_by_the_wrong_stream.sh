#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# megatron-fsdp with fsdp_double_buffer: the gradient of a third unit is written into the buffer that the reduce-scatter of the first one still reads.
# Nothing orders the two. The reduced gradient is wrong when the reduce-scatter is slower than the backward of two units.
#
# Why: GradReducePipeline._enforce_double_buffer_limit gives a buffer back behind a wait for its reduce-scatter. It does so under
# torch.cuda.stream(self.rs_stream), so the stream that waits is the one that the reduce-scatter was issued to, and for it the wait is none. The next
# owner of the buffer is _grad_acc (megatron_fsdp.py:652 and 658), which copies the gradient into it on the compute stream.
#
# Traced here: the library's own pipeline and pool of buffers, on the CPU, with streams that say their names.
# Installs torch and megatron-fsdp into a temporary folder. Exit code 0: as described; 1: otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile torch==2.15.0 megatron-fsdp==0.6.1 numpy
cat >"$folder/trace.py" <<'PYTHON'
import contextlib
import types

import torch

current = ["compute"]
said = []


@contextlib.contextmanager
def stream(name):
    before, current[0] = current[0], name
    yield
    current[0] = before


class Event:  # of the reduce-scatter of a bucket, recorded on the stream of reduce-scatters
    def __init__(self, bucket):
        self.bucket = bucket

    def wait(self):
        said.append(f"the {current[0]} stream waits for the reduce-scatter of bucket {self.bucket}")


torch.cuda.stream = stream
torch.cuda.current_device = lambda: "cpu"

from megatron_fsdp.param_and_grad_buffer import FixedPoolAllocator, GradReducePipeline  # noqa: E402

SIZE = 16
groups = [
    types.SimpleNamespace(fsdp_unit_id=unit, dtype=torch.float32, params=[torch.zeros(SIZE)], main_grad_buffer=None)
    for unit in range(3)
]
pool = FixedPoolAllocator("gradients", groups)
buffer = types.SimpleNamespace(
    num_buckets=3,
    parameter_groups=groups,
    ddp_config=types.SimpleNamespace(fsdp_double_buffer=True),
    double_buf_units=pool.fsdp_double_buffer_units,
    dist_index=types.SimpleNamespace(use_hybrid_fsdp=False),
)
pipeline = GradReducePipeline(buffer, rs_stream="reduce-scatter")


def main_grad(bucket):  # as ParamAndGradBuffer's main_grad_getter, which _grad_acc calls on the compute stream
    pipeline._enforce_double_buffer_limit([bucket])
    return pool.allocate(bucket, SIZE, torch.float32, torch.device("cpu")).data.data_ptr()


addresses = []
for bucket in range(3):
    addresses.append(main_grad(bucket))
    place = list(dict.fromkeys(addresses)).index(addresses[-1])
    said.append(f"the {current[0]} stream writes the gradient of bucket {bucket} into buffer {place}")
    said.append(f"the reduce-scatter stream reads the gradient of bucket {bucket}")
    pipeline.grad_reduce_queue.append((Event(bucket), lambda bucket=bucket: pool.free(bucket), bucket))
print("\n".join(said))
PYTHON
cd "$folder"
venv/bin/python -W ignore trace.py | tee said
venv/bin/python -c 'import torch; from importlib.metadata import version; print("torch", torch.__version__, "megatron-fsdp", version("megatron-fsdp"))'
cat >wanted <<'SAID'
the compute stream writes the gradient of bucket 0 into buffer 0
the reduce-scatter stream reads the gradient of bucket 0
the compute stream writes the gradient of bucket 1 into buffer 1
the reduce-scatter stream reads the gradient of bucket 1
the reduce-scatter stream waits for the reduce-scatter of bucket 0
the compute stream writes the gradient of bucket 2 into buffer 0
the reduce-scatter stream reads the gradient of bucket 2
SAID
if cmp said wanted; then echo "as described"; else
  echo "CHANGED: not as described"
  exit 1
fi
