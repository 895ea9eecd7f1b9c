# SPDX-License-Identifier: Apache-2.0
"""transformers' models make a mask for fake tensors, which they take for a graph capture, and attend by another kernel
then. A traced one goes the way of a real step."""

from __future__ import annotations

import contextlib
import os
import sys
import unittest.mock
from collections.abc import Callable, Iterator

from shardplan.tracer.recorder import Answers

# Functions of masking_utils that read values of a mask, or of positions. Models of encoders and decoders make a mask of
# ones by themselves.
_READ_MASKS = ("find_packed_sequence_indices", "_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


@contextlib.contextmanager
def as_in_a_step(answers: Answers) -> Iterator[None]:
    """Inside, transformers sees a step with one sequence in each row: where it reads a value to choose its way, no
    padding and no packed sequences. It does not count tokens that stand for images."""
    masking = sys.modules.get("transformers.masking_utils")  # every model of transformers has imported it
    if masking is None:
        yield
        return

    def without_padding(reads: Callable) -> Callable:
        def answered(*arguments, **options):
            answers.scalar = True  # "is there one sequence per row?", "does every token take part?"
            try:
                return reads(*arguments, **options)
            finally:
                answers.scalar = None

        return answered

    with contextlib.ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.dict(os.environ, {"TRANSFORMERS_DISABLE_TORCH_CHECK": "1"}))
        stack.enter_context(unittest.mock.patch.object(masking, "is_tracing", lambda tensor=None: False))
        for name in _READ_MASKS:
            if reads := getattr(masking, name, None):
                stack.enter_context(unittest.mock.patch.object(masking, name, without_padding(reads)))
        yield
