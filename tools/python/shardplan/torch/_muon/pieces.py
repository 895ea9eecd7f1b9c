# SPDX-License-Identifier: Apache-2.0
"""The layout of an exchange's buffers (docs/reference/plan-format.md). Offsets and counts are elements.

Two ranks, matrices A and C of owner 0, B of owner 1; A0 are the rows of A that shard 0 has:

    pieces on rank 0   | A0 C0 | B0 |        whole on rank 0   | A0 C0 | A1 C1 |
    pieces on rank 1   | A1 C1 | B1 |        whole on rank 1   | B0 | B1 |

`there` takes the parts of the pieces to the owners, `back` takes the parts of the whole to the shards. With replicas
each rank of the group owns matrices of its own. All replicas have the same rows, so a shard sends to the owners in its
replica only. Owners send to all replicas.

Without owners every rank gathers all pieces, padded to the length of the first rank's, and reads its results there:

    pieces on rank 1   | A1 B1 - |            whole on each    | A0 B0 | A1 B1 - |
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

PIECES, WHOLE = "update_pieces", "update_whole"  # roles of the buffers


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Rows first_row to first_row + rows of a parameter that is seen as [numel / columns, columns]."""

    shape: tuple[int, ...]  # of the parameter, which is cut along dimension 0 as torch.chunk cuts
    owner: int | None  # None: every rank has it whole
    first_row: int
    rows: int

    @property
    def columns(self) -> int:
        return self.shape[-1]

    def rows_of_shard(self, shard: int, shards: int) -> tuple[int, int]:
        """The parameter's rows that the shard has: begin and end."""
        length, height = self.shape[0], math.prod(self.shape[1:-1])
        size = -(-length // shards)
        return min(shard * size, length) * height, min((shard + 1) * size, length) * height


class Part(NamedTuple):
    """The rows of a matrix that one shard has, in a buffer. There is no part without rows."""

    matrix: int
    first: int  # row of the matrix
    rows: int
    at: int
    first_local: int  # the same row in the shard's piece of the parameter

    def size(self, matrices: tuple[Matrix, ...]) -> int:
        return self.rows * matrices[self.matrix].columns


@dataclasses.dataclass(frozen=True)
class Layout:
    """An exchange between replicas x shards ranks: rank = replica * shards + shard."""

    matrices: tuple[Matrix, ...]
    ranks: int
    shards: int

    @property
    def owned(self) -> bool:
        """All matrices of an exchange have an owner, or none has."""
        return self.matrices[0].owner is not None

    def _parts(self, order: list[tuple[int, int]], at: int = 0) -> list[Part]:
        """order: (shard, matrix) as they lie in the buffer, from `at` on."""
        parts = []
        for shard, number in order:
            matrix = self.matrices[number]
            begin, end = matrix.rows_of_shard(shard, self.shards)
            first = max(begin, matrix.first_row)
            rows = min(end, matrix.first_row + matrix.rows) - first
            if rows > 0:
                parts.append(Part(number, first - matrix.first_row, rows, at, first - begin))
                at += rows * matrix.columns
        return parts

    def of_owner(self, rank: int) -> list[int]:
        """The matrices that the rank has whole."""
        return [number for number, matrix in enumerate(self.matrices) if matrix.owner in (rank, None)]

    def pieces(self, rank: int) -> list[Part]:
        """The parts of `update_pieces` in order: owner by owner, this rank's rows of the owner's matrices."""
        shard, owners = rank % self.shards, range(self.ranks) if self.owned else [rank]
        return self._parts([(shard, number) for owner in owners for number in self.of_owner(owner)])

    def _gathered(self, shard: int) -> list[Part]:
        """Without owners: the shard's parts of `update_whole`."""
        return self._parts([(shard, number) for number in range(len(self.matrices))], shard * self.padded)

    @property
    def padded(self) -> int:
        """Without owners: the length of every rank's pieces. The first rank has the most rows of each parameter."""
        return self.size(self.pieces(0))

    def whole(self, rank: int) -> list[Part]:
        """The parts of `update_whole` in order: shard by shard, its rows of the rank's matrices."""
        if not self.owned:
            return [part for shard in range(self.shards) for part in self._gathered(shard)]
        own = self.of_owner(rank)
        return self._parts([(shard, number) for shard in range(self.shards) for number in own])

    def results(self, rank: int) -> list[Part]:
        """This rank's rows of the results: in `update_pieces`, without owners in `update_whole`."""
        return self.pieces(rank) if self.owned else self._gathered(rank)

    def sizes(self, rank: int) -> dict[str, int]:
        """Lengths of the rank's buffers, by role."""
        if not self.owned:
            return {PIECES: self.padded, WHOLE: self.padded * self.ranks}
        return {PIECES: self.size(self.pieces(rank)), WHOLE: self.size(self.whole(rank))}

    def size(self, parts: list[Part]) -> int:
        return sum(part.size(self.matrices) for part in parts)

    def count(self, rank: int, owner: int) -> int:
        """How much of the owner's matrices the rank has."""
        return self.size(self._parts([(rank % self.shards, number) for number in self.of_owner(owner)]))

    def _in_replica(self, rank: int) -> range:
        """The ranks of the same replica."""
        first = rank - rank % self.shards
        return range(first, first + self.shards)

    def there(self, rank: int) -> tuple[list[int], list[int]]:
        """Counts on the way to the owners: sent to each rank, and received from each."""
        near = self._in_replica(rank)
        sent = [self.count(rank, other) if other in near else 0 for other in range(self.ranks)]
        received = [self.count(other, rank) if other in near else 0 for other in range(self.ranks)]
        return sent, received

    def back(self, rank: int) -> tuple[list[int], list[int]]:
        """The same on the way back. With replicas the shards' parts of the whole are sent once for each of them."""
        everyone = range(self.ranks)
        return [self.count(other, rank) for other in everyone], [self.count(rank, other) for other in everyone]

    def sent_there(self, rank: int) -> tuple[int, int]:
        """The part of the pieces that goes to the owners in the rank's replica: begin and end."""
        near = self._in_replica(rank)
        begin = sum(self.count(rank, owner) for owner in range(near.start))
        return begin, begin + sum(self.count(rank, owner) for owner in near)
