# SPDX-License-Identifier: Apache-2.0
"""Which of the plans that a model has followed its next step is likely to follow.

[Note: the next path] A job that alternates between tasks, experts or branches has a plan for each way that a step goes. A step that follows the wrong
one is finished on demand, which is right and slow. So the step is foreseen: from what its first forward is given, if steps with
such arguments have always gone one way, else from the steps before it. All ranks see the same and foresee the same.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable

_STEPS = 64  # that are remembered
_CONTEXT = 8  # steps that are compared with those before them
_SIGNATURES = 1024


class NextPath:
    def __init__(self) -> None:
        self._steps: collections.deque[Hashable] = collections.deque(maxlen=_STEPS)
        self._by_signature: dict[Hashable, Hashable | None] = {}  # None: such steps have gone several ways
        self._signature: Hashable = None

    def begins(self, signature: Hashable) -> None:
        """A step with such arguments has begun."""
        self._signature = signature

    def went(self, path: Hashable) -> None:
        """The step under way is over."""
        self._steps.append(path)
        signature, self._signature = self._signature, None
        if signature is not None and (signature in self._by_signature or len(self._by_signature) < _SIGNATURES):
            known = self._by_signature.setdefault(signature, path)
            self._by_signature[signature] = path if known == path else None

    def expected(self) -> Hashable | None:
        """The way that the step goes that has begun. None: nobody knows."""
        return self._by_signature.get(self._signature) or self._after_steps()

    def _after_steps(self) -> Hashable | None:
        """What followed the last time that the latest steps were the same, as many of them as were ever the same."""
        steps = list(self._steps)
        best, longest = None, 0
        for end in range(1, len(steps)):
            same = 0
            while same < min(_CONTEXT, end) and steps[end - 1 - same] == steps[-1 - same]:
                same += 1
            if same >= longest and same > 0:
                best, longest = steps[end], same
        return best if longest else (steps[-1] if steps else None)
