# SPDX-License-Identifier: Apache-2.0
"""One piece of work that ran, and what it moved if it is a collective."""

from __future__ import annotations

import dataclasses

HOST, GLOO = -1, -2  # in place of a stream: the host itself, threads of Gloo


@dataclasses.dataclass(frozen=True)
class Collective:
    """communicator, of_model: filled in by communicators.py."""

    kind: str  # the plan's name; what the profile calls it where a plan has none
    group: tuple[int, ...]  # ranks; () where the profile does not list them
    full_tensor_bytes: int  # 0 where the profile does not say them
    size: int = 0  # ranks of the group, where the profile says no more
    group_name: str = ""  # torch's, of the process group: "mesh_ep"
    communicator: str = ""
    of_model: bool = False

    @property
    def ranks(self) -> int:
        """0: not known."""
        return len(self.group) or self.size


@dataclasses.dataclass
class Work:
    """operators, ranges: the host's, where it was launched, the innermost last."""

    begin_ns: int
    end_ns: int
    stream: int  # of the device; HOST, GLOO
    name: str
    launched_ns: int
    operators: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()
    collective: Collective | None = None
    part: object = None  # parts.Part, where it is known without ranges
    stream_name: str = ""  # the plan's, likewise

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns
