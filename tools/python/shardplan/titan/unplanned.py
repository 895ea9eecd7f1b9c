# SPDX-License-Identifier: Apache-2.0
"""Jobs of torchtitan that are in no plan, traced or trained."""

from __future__ import annotations

from typing import Any


def why_not_planned(config: Any) -> str:
    """config: torchtitan's Trainer.Config. "": it is planned."""
    stages = config.parallelism.pipeline_parallel_degree
    if stages <= 1:
        return ""
    return f"pipeline parallelism is in no plan (found parallelism.pipeline_parallel_degree {stages}, expected 1)"
