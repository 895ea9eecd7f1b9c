#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# PyPI's torch brings the header of c10d::ProcessGroupGloo, and exports the class. A C++ extension that makes such a group cannot be compiled with the
# wheel alone: the header includes gloo's headers, and the wheel has none of them. Without the macro that includes them the class is not declared.
#
# torch.utils.cpp_extension finds everything else of torch in the wheel. Who wants Gloo groups in C++ has to bring gloo's headers (Debian: libgloo-dev).
#
# Fetches torch into a temporary folder, and reads what is in it. Exit code 0: as described; 1: otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --only-binary :all: -d "$folder" torch==2.15.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import pathlib
import re
import sys
import zipfile

(wheel,) = pathlib.Path(sys.argv[1]).glob("torch-*.whl")
with zipfile.ZipFile(wheel) as files:
    names = files.namelist()
    header = "torch/include/torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"
    text = files.read(header).decode()
wanted = re.findall(r"^#include <(gloo/[^>]+)>", text, re.MULTILINE)
there = [name for name in wanted if f"torch/include/{name}" in names]
guarded = text.index("#ifdef USE_C10D_GLOO") < text.index("#include <gloo/") if "#ifdef USE_C10D_GLOO" in text else False
print(f"{wheel.name.split('-cp')[0]}: {header.split('/')[-1]} includes {', '.join(wanted)}")
print(f"of these the wheel has {len(there)}; of any header of gloo {sum(name.startswith('torch/include/gloo/') for name in names)}")
print(f"they stand behind USE_C10D_GLOO, as the class does: {guarded}")
as_described = len(wanted) > 0 and not there and guarded and not any(name.startswith("torch/include/gloo/") for name in names)
print("as described" if as_described else "otherwise")
sys.exit(0 if as_described else 1)
PYTHON
