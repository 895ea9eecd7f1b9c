# SPDX-License-Identifier: Apache-2.0
"""Is what the restarted job loaded what the first one saved, bit for bit, and does it go on as the first one went
on?"""

from __future__ import annotations

import json
import pathlib
import sys

import torch


def tensors_of(value: object, path: tuple = ()) -> dict[tuple, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {path: value}
    items = value.items() if isinstance(value, dict) else ()
    return {place: tensor for key, item in items for place, tensor in tensors_of(item, (*path, key)).items()}


def main() -> int:
    folder = pathlib.Path(sys.argv[1])
    saved, again = (tensors_of(torch.load(folder / f"{name}.pt", weights_only=True)) for name in ("step_3", "again"))
    same = saved.keys() == again.keys() and all(torch.equal(tensor, again[place]) for place, tensor in saved.items())
    print(
        f"{len(saved)} tensors of the state, written by 2 ranks and again by 3: {'equal' if same else 'NOT equal'} "
        "bit for bit"
    )
    went_on, restarted = (json.loads((folder / f"{name}.json").read_text()) for name in ("went_on", "restarted"))
    close = len(restarted) == 3 and all(abs(a - b) < 1e-4 for a, b in zip(went_on[3:], restarted))
    print(
        f"losses of the steps after the checkpoint: {'the same' if close else f'DIFFERENT: {went_on[3:]} {restarted}'}"
    )
    return 0 if same and close else 1


if __name__ == "__main__":
    sys.exit(main())
