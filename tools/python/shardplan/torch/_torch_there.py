# SPDX-License-Identifier: Apache-2.0
"""Whether there is a torch that plans can be followed with."""

from shardplan.installing import why_no_torch


def check() -> None:
    """ImportError where there is none, or one that is too old. A newer one may do."""
    if problem := why_no_torch():
        raise ImportError(f"shardplan.torch: {problem}")
