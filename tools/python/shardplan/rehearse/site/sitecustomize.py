# SPDX-License-Identifier: Apache-2.0
"""First on the PYTHONPATH of a rehearsed command: every Python process of it runs this before its own code. Without
torch it costs a dictionary look-up an import."""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_one_behind() -> None:
    """The sitecustomize that this one hides, if there is one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    paths = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    if (spec := PathFinder.find_spec("sitecustomize", paths)) is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


if "SHARDPLAN_REHEARSE" in os.environ:
    import shardplan_rehearsal

    shardplan_rehearsal.begin()
_run_the_one_behind()
