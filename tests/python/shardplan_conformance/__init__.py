# SPDX-License-Identifier: Apache-2.0
"""Compares the installed PyTorch's FSDP with what shardplan plans, event for event (docs/internals/conformance.md).

`Case` says what to run; `shardplan conformance` is the command. `tests/python` is on the path: conftest.py and the
command put it there.
"""

from shardplan_conformance.case import Case, Forward

__all__ = ["Case", "Forward"]
