# SPDX-License-Identifier: Apache-2.0
"""Whether there is a torch that plans can be followed with."""

import importlib.util

from shardplan.installing import TORCH_RELEASES, how_to_install


def check() -> None:
    """ImportError where there is none, or one that is too old. A newer one may do."""
    if importlib.util.find_spec("torch") is None:
        raise ImportError(f"shardplan.torch needs torch, which is not installed: {how_to_install('torch')}")
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < TORCH_RELEASES[0]:
        raise ImportError(f"shardplan.torch needs torch {'.'.join(map(str, TORCH_RELEASES[0]))} or later (found {torch.__version__})")
