# SPDX-License-Identifier: Apache-2.0
"""A rehearsed process's work beside its own code. It runs in the interpreter of the script: it needs nothing of the
package shardplan, and nothing of torch before the script imports it."""

import os


def begin() -> None:
    """Waits for imports of torch, at the start of a Python process; or goes on in a fork of a process that has imported
    it."""
    from . import imports

    if "SHARDPLAN_REHEARSE_KEEP" in os.environ:
        from . import kept, rank

        if os.environ.get(rank.WORKER) in (None, str(os.getpid())):
            kept.enter()
    imports.before("torch", _torch_comes)


def _torch_comes() -> None:
    from . import roles  # with all that it imports, and no earlier

    roles.take()
