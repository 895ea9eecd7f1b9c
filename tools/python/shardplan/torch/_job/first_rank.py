# SPDX-License-Identifier: Apache-2.0
"""Results of the first rank, on all ranks."""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Callable

import torch.distributed as dist

from .arguments import PlanError
from .peers import connect
from .store import next_store


def _alone(ranks: list[int]) -> bool:
    return len(ranks) < 2 or dist.get_backend() == "fake"


def from_first_rank(make: Callable[[], str], ranks: list[int], timeout_s: float) -> str:
    """The result of make() on the first of the ranks, on all of them; PlanError likewise. Collective."""
    if _alone(ranks):
        return make()
    store = next_store("auto", ranks, timeout_s)
    if dist.get_rank() == ranks[0]:
        try:
            text = make()
        except Exception as error:
            store.set("made", zlib.compress(f"!{error}".encode()))
            raise
        store.set("made", zlib.compress(f"={text}".encode()))
        return text

    def wait() -> str:
        store.wait(["made"], datetime.timedelta(seconds=timeout_s))
        return zlib.decompress(store.get("made")).decode()

    text = connect(wait, timeout_s)
    if text[0] == "!":
        raise PlanError(f"rank {ranks[0]}: {text[1:]}")
    return text[1:]


class AgreedMoment:
    """From which step on all ranks know of something that comes to be on the first rank while they train.

    The first rank says at the begin of each step whether it is there, and every rank looks at what was said a step
    earlier: nobody waits for a rank that is not a step behind.
    """

    def __init__(self, ranks: list[int], timeout_s: float) -> None:
        """Collective."""
        self._store = None if _alone(ranks) else next_store("auto", ranks, timeout_s)
        self._is_first, self._timeout_s, self._steps, self._said = dist.get_rank() == ranks[0], timeout_s, 0, False

    def has_come(self, is_there: bool) -> bool:
        """At the begin of each step, on every rank. is_there: the first rank's word; the others' is not looked at."""
        if self._store is None:
            return is_there
        said, self._said, step = self._said, is_there, self._steps
        self._steps += 1
        if self._is_first:
            self._store.set(f"step {step}", "1" if is_there else "0")
            if step > 1:
                self._store.delete_key(f"step {step - 2}")
            return said
        if step == 0:
            return False
        before = f"step {step - 1}"
        connect(lambda: self._store.wait([before], datetime.timedelta(seconds=self._timeout_s)), self._timeout_s)
        return self._store.get(before) == b"1"


_AHEAD = 64  # steps that the first rank's host may be ahead of another's


class FirstRankSays:
    """A word of the first rank's in each step, which the others wait for."""

    def __init__(self, ranks: list[int], timeout_s: float) -> None:
        """Collective."""
        self._store = None if _alone(ranks) else next_store("says", ranks, timeout_s)
        self._is_first, self._timeout_s, self._steps = dist.get_rank() == ranks[0], timeout_s, 0

    def of_step(self, word: str) -> str:
        """word: the first rank's; the others' is not looked at."""
        if self._store is None:
            return word
        step, self._steps = f"step {self._steps}", self._steps + 1
        if self._is_first:
            self._store.set(step, word)
            if self._steps > _AHEAD:
                self._store.delete_key(f"step {self._steps - 1 - _AHEAD}")
            return word
        if not self._store.check([step]):
            connect(lambda: self._store.wait([step], datetime.timedelta(seconds=self._timeout_s)), self._timeout_s)
        return self._store.get(step).decode()
