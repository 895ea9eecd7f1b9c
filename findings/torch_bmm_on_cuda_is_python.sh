#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# With PyPI's torch 2.15 and the Triton that it brings, the CUDA kernel of aten::bmm is a Python function: `import torch` puts it there, on machines
# without a GPU, too. 2.11 has the C++ kernel. TORCH_DISABLE_NATIVE_JIT=1 leaves the C++ kernel in its place.
#
# The function asks in Python whether the product is one of columns by rows (an inner dimension of 1), which a kernel of Triton computes, and calls the
# C++ kernel otherwise. So each batched product on CUDA takes the interpreter's lock, those of autograd's threads included. One of columns by rows takes no
# workspace of cuBLAS, which a model of the allocator's memory has to know.
#
# Installs torch into a temporary folder. Exit code 0: as described; 1: otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/where.py" <<'PYTHON'
import importlib.metadata
import re
import torch

kernel = re.search(r"^CUDA: registered at (\S+)", torch._C._dispatch_dump("aten::bmm"), re.MULTILINE)
place = re.sub(r".*/(site-packages|pytorch)/", "", kernel[1]) if kernel else "nowhere"
language = "Python" if ".py:" in place else "C++"
print(f"torch {torch.__version__.split('+')[0]}, triton {importlib.metadata.version('triton')}: the CUDA kernel of aten::bmm is {language} ({place.split(':')[0]})")
PYTHON
for release in 2.15.0 2.11.0; do
  python3 -m venv "$folder/$release"
  "$folder/$release/bin/pip" install --quiet --disable-pip-version-check --no-compile "torch==$release" numpy
  "$folder/$release/bin/python" -W ignore "$folder/where.py" | tee "$folder/said.$release"
  TORCH_DISABLE_NATIVE_JIT=1 "$folder/$release/bin/python" -W ignore "$folder/where.py" | sed 's/^/TORCH_DISABLE_NATIVE_JIT=1: /' | tee -a "$folder/said.$release"
  rm -rf "${folder:?}/$release"
done
languages=$(cat "$folder"/said.2.15.0 "$folder"/said.2.11.0 | grep -o 'is \(Python\|C++\)' | tr '\n' ' ')
if [ "$languages" = "is Python is C++ is C++ is C++ " ]; then echo "as described"; else
  echo "otherwise"
  exit 1
fi
