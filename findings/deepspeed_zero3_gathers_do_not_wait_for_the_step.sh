#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# DeepSpeed's ZeRO stage 3 with overlap_comm, its default there: the first gather of a step does not wait for the optimizer's step before it. It may send
# shards of the last step, or of each some. The loss is then that of other weights. Nothing is said of it.
#
# Why: PartitionedParameterCoordinator gathers on a stream of its own. The step waits for that stream (deepspeed/runtime/zero/
# partitioned_param_coordinator.py:415), and that stream never waits for the step. The shards were written on the step's stream (stage3.py:2858).
# Who meets it: whoever has no wait of the host in between. There is one while the throughput timer is on (from the second step), where a parameter lies
# below stage3_param_persistence_threshold, or where the batch is copied from pageable memory.
#
# Traced here: the library's own coordinator on the CPU, with streams that say their names and a weight that is gathered by a stand-in.
# Installs torch and DeepSpeed into a temporary folder. Exit code 0: as described; 1: otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile torch==2.15.0 numpy setuptools wheel
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile --no-build-isolation deepspeed==0.19.8
cat >"$folder/trace.py" <<'PYTHON'
import contextlib
import types

import torch
from deepspeed.runtime.zero import partitioned_param_coordinator as coordinators
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus


class Stream:
    def __init__(self, name):
        self.name = name

    def wait_stream(self, other):
        print(f"the stream {self.name} waits for the stream {other.name}")


current = [Stream("of the step")]


@contextlib.contextmanager
def stream(chosen):
    current.append(chosen)
    yield
    current.pop()


class Event:
    def record(self):
        pass

    def query(self):
        return True


class Handle:
    def __init__(self, weight):
        self.weight = weight

    def wait(self, **_):
        self.weight.ds_status = ZeroParamStatus.AVAILABLE


def all_gather_coalesced(weights, **_):
    print(f"shards are gathered on the stream {current[-1].name}")
    weights[0].ds_status = ZeroParamStatus.INFLIGHT
    return Handle(weights[0])


accelerator = types.SimpleNamespace(
    Stream=Stream,
    Event=Event,
    stream=stream,
    current_stream=lambda: current[-1],
    resolves_data_dependency=lambda: False,  # these three as DeepSpeed's CUDA accelerator says
    handles_memory_backpressure=lambda: False,
    is_synchronized_device=lambda: False,
)
coordinators.get_accelerator = lambda: accelerator
coordinators.dist.get_rank = lambda *_: 1
module = torch.nn.Linear(4, 4, bias=False)
module.ds_id, module.ds_external_parameters = 0, lambda: ()
weight = module.weight
weight.ds_id, weight.ds_numel, weight.ds_shape, weight.ds_persist = 0, 16, weight.shape, False
weight.ds_status, weight.ds_active_sub_modules, weight.ds_secondary_tensor = ZeroParamStatus.NOT_AVAILABLE, set(), None
weight.ds_tensor = types.SimpleNamespace(final_location=None)
weight.partition_numel, weight.ds_summary = lambda: 8, lambda: {}
weight.all_gather_coalesced = all_gather_coalesced
coordinator = coordinators.PartitionedParameterCoordinator(
    prefetch_bucket_sz=1,
    max_reuse_distance_in_numel=1,
    max_available_parameters_in_numel=1,
    allgather_stream=Stream("of gathers"),
    inflight_param_registry=coordinators.InflightParamRegistry(),
)
print(f"an optimizer writes the shards on the stream {current[-1].name}")
coordinator.fetch_sub_module(module, forward=True)
PYTHON
cd "$folder"
venv/bin/python -W ignore trace.py 2>/dev/null | grep -v '^\[' | tee said
venv/bin/python -c 'import torch; from importlib.metadata import version; print("torch", torch.__version__, "deepspeed", version("deepspeed"))'
cat >wanted <<'SAID'
an optimizer writes the shards on the stream of the step
shards are gathered on the stream of gathers
the stream of the step waits for the stream of gathers
SAID
if cmp said wanted; then echo "as described"; else
  echo "CHANGED: not as described"
  exit 1
fi
