# SPDX-License-Identifier: Apache-2.0
"""transformers' models make a mask for fake tensors, which they take for a graph capture, and attend by another kernel then. A traced one goes the way of a real step."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from shardplan.tracer.recorder import Answers


@contextlib.contextmanager
def as_in_a_step(answers: Answers) -> Iterator[None]:
    """Inside, transformers sees a step with one sequence in each row: where it reads a value to choose its way, no padding and no packed sequences."""
    masking = sys.modules.get("transformers.masking_utils")  # every model of transformers has imported it
    if masking is None:
        yield
        return
    tracing, packed = masking.is_tracing, masking.find_packed_sequence_indices

    def no_packing(position_ids):
        answers.scalar = True  # "is there one sequence per row?"
        try:
            return packed(position_ids)
        finally:
            answers.scalar = None

    masking.is_tracing = lambda tensor=None: False
    masking.find_packed_sequence_indices = no_packing
    try:
        yield
    finally:
        masking.is_tracing, masking.find_packed_sequence_indices = tracing, packed
