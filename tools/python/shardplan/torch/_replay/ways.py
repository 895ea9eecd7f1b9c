# SPDX-License-Identifier: Apache-2.0
"""Ways that steps go: the points that they pass, and which way the next one is likely to go.

[Note: the next path] A job that alternates between tasks, experts or branches has a plan for each way that a step goes.
A step that follows the wrong one is finished on demand, which is right and slow. So the step is foreseen: from what its
first forward is given, if steps with such arguments have always gone one way, else from the steps before it. All ranks
see the same and foresee the same.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Hashable

from .._plans.documents import RequiresGrad

_STEPS = 64  # that are remembered
_CONTEXT = 8  # steps that are compared with those before them
_SIGNATURES = 1024

# (requires_grad, points of a step, full-precision forwards, calls of setters)
Way = tuple[RequiresGrad, tuple, tuple[bool, ...], str]


def points(log: list[tuple]) -> tuple:
    """The points of a step, or of a plan's step. A gradient belongs to its unit's next post_backward, or to the end of
    the
    backward: which hook saw it first changes no plan."""
    passed, gradients = [], []
    for kind, unit, made, keeps in log:
        if kind in ("enter", "leave"):
            passed.append((kind, unit, tuple(made)))
            continue
        gradients += made
        if kind in ("post_backward", "backward_end", "backward_over"):
            taken = sorted(one for one in gradients if kind != "post_backward" or one[0] == unit)
            gradients = [one for one in gradients if one not in taken]
            passed.append((kind, unit, tuple(taken), keeps))
        elif kind not in ("optimizer_step", "zero_grad", "step_end"):
            passed.append((kind, unit, keeps))
    return tuple(passed)


def in_words(plan, passed: tuple) -> list[str]:
    """Points for people, each with the gradients that were made."""

    def words(kind: str, unit: int, *rest) -> str:
        of = f" of {plan.units[unit].fqn or 'the root'}" if unit >= 0 else ""
        if kind in ("enter", "leave"):
            return f"{kind} of {plan.units[unit].modules[rest[0][0]]}"
        made = [plan.units[u].parameters[p].fqn for u, p in rest[0]] if len(rest) > 1 else []
        return f"{kind}{of}" + (f" with gradients of {', '.join(made)}" if made else "")

    return [words(*point) for point in passed]


def apart(ways: list[str], ranks: list[int]) -> str:
    """The first point that ranks passed otherwise. ways: by place, as JSON; "" where nothing is known."""
    known = {rank: json.loads(way) for rank, way in zip(ranks, ways) if way}
    length = max(map(len, known.values()))
    at = {rank: [*way, *["the end of the step"] * (length + 1 - len(way))] for rank, way in known.items()}
    first = next((i for i in range(length) if len({way[i] for way in at.values()}) > 1), None)
    if first is None:
        return "ranks went different ways (with other setters, or parameters that require gradients)"
    return "ranks went different ways: " + "; ".join(f"rank {rank} passed {way[first]}" for rank, way in at.items())


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
        """The way that followed the longest earlier run of steps like the latest ones."""
        steps = list(self._steps)
        best, longest = None, 0
        for end in range(1, len(steps)):
            same = 0
            while same < min(_CONTEXT, end) and steps[end - 1 - same] == steps[-1 - same]:
                same += 1
            if same >= longest and same > 0:
                best, longest = steps[end], same
        return best if longest else (steps[-1] if steps else None)
