# SPDX-License-Identifier: Apache-2.0
"""Compares the installed PyTorch's FSDP with what shardplan plans, event for event (docs/internals/conformance.md).

`Case` says what to run; `python -m shardplan.conformance` (`shardplan conformance`) is the command.
"""

from shardplan.conformance.case import Case, Forward

__all__ = ["Case", "Forward"]
