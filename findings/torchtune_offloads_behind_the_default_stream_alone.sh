#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# torchtune's OffloadActivations(use_streams=True), its default, in a step that runs on another stream than the default one: the copy of an activation
# to the host waits for the default stream, not for the stream that computes it. Activations are stored before they are computed. Nothing is said of it.
#
# Why: torchtune/training/_activation_offloading.py:93 takes torch.cuda.default_stream() for the stream of the computation, once, when the context is
# made. The waits in front of the copies to the host (line 166) and behind the copies back (line 279) are between it and the stream of copies.
# Who meets it: whoever uses the context under torch.cuda.stream(...). torchtune's recipes do not. trl, which has this code, mended it in its 7195.
#
# Traced here: the forward on the CPU, with streams that say their names. torchtune's file is loaded alone, with stand-ins for what it names of the
# rest of torchtune and of torchao. Installs torch and torchtune into a temporary folder. Exit code 0: as described; 1: otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile torch==2.15.0 numpy psutil
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile --no-deps torchtune==0.6.1
cat >"$folder/trace.py" <<'PYTHON'
import contextlib
import importlib.metadata
import importlib.util
import logging
import sys
import types

import torch


def stand_in(name, **names):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(names)


stand_in("torchao", __version__="0.18.0")
stand_in("torchao.dtypes")
stand_in("torchao.dtypes.nf4tensor", NF4Tensor=type("NF4Tensor", (), {}))
stand_in("torchtune")
stand_in("torchtune.modules", TiedLinear=type("TiedLinear", (), {}))
stand_in("torchtune.utils", get_logger=lambda *_: logging.getLogger())
current = []


class Stream:
    def __init__(self, name="copies"):
        self.name = name

    def wait_stream(self, other):
        print(f"the stream {self.name} waits for the stream {other.name}")

    def record_event(self):
        return self


@contextlib.contextmanager
def stream(chosen):
    current.append(chosen)
    yield
    current.pop()


copy = torch.Tensor.copy_


def copy_(self, source, non_blocking=False):
    print(f"an activation is copied on the stream {current[-1].name}")
    return copy(self, source)


torch.cuda.default_stream = lambda: Stream("default")
torch.cuda.current_stream = lambda: current[-1]
torch.cuda.Stream, torch.cuda.stream = Stream, stream
torch.Tensor.copy_ = copy_
place = importlib.metadata.distribution("torchtune").locate_file("torchtune/training/_activation_offloading.py")
described = importlib.util.spec_from_file_location("offloading", place)
offloading = importlib.util.module_from_spec(described)
described.loader.exec_module(offloading)

x = torch.ones(1024, requires_grad=True) * 1
with stream(Stream("side")), offloading.OffloadActivations(use_pin_memory=False):
    print(f"the forward runs on the stream {current[-1].name}")
    x.sin()
PYTHON
cd "$folder"
venv/bin/python -W ignore trace.py | tee said
venv/bin/python -c 'import torch; from importlib.metadata import version; print("torch", torch.__version__, "torchtune", version("torchtune"))'
cat >wanted <<'SAID'
the forward runs on the stream side
the stream copies waits for the stream default
an activation is copied on the stream copies
SAID
if cmp said wanted; then echo "as described"; else
  echo "CHANGED: not as described"
  exit 1
fi
