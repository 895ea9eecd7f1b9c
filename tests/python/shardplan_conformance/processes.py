# SPDX-License-Identifier: Apache-2.0
"""How processes of a case are started."""

from __future__ import annotations

import multiprocessing

_PRELOADED = ["torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.optim", "torch.optim"]


def context():
    """Forks of a process that has imported torch and done nothing else: importing takes longer than most cases."""
    result = multiprocessing.get_context("forkserver")
    result.set_forkserver_preload(_PRELOADED)
    return result
