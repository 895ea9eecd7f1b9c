# SPDX-License-Identifier: Apache-2.0
"""The groups of ranks among which a model communicates, as digits of a rank's number: `communicators` of a trace.

A group is named as the dimension of a mesh that it is. It is found by the process group, else by the ranks: several
process groups may have the same ones. Along a flattened dimension the dimensions that it is made of say whose batch
the ranks work on.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shardplan.tracer.batch_dimensions import BatchDimensions
from shardplan.tracer.collectives import CollectiveProblem
from shardplan.tracer.errors import TracerError
from shardplan.tracer.fake_meshes import known_meshes

Ranks = tuple[int, ...]  # ascending


def digits(ranks: Ranks, world_size: int) -> list[tuple[int, int]] | None:
    """(size, stride) of the digits of a rank's number in which these ranks differ, the outermost first; None: no such
    digits make groups of all ranks. Digits that lie side by side are one."""
    offsets, found = [rank - ranks[0] for rank in ranks], []
    while len(offsets) > 1:
        stride, size = offsets[1], 1
        while size < len(offsets) and offsets[size] == size * stride:
            size += 1
        if any(offset != offsets[i - i % size] + i % size * stride for i, offset in enumerate(offsets)):
            return None
        if len(offsets) % size or world_size % (size * stride) or ranks[0] // stride % size:
            return None
        found.insert(0, (size, stride))
        offsets = offsets[::size]
    return found


@dataclass
class _Mesh:
    names: list[str]
    is_named: bool
    groups: dict[str, list[str]]  # by process group: names of dimensions
    lines: dict[Ranks, list[str]]  # this rank's, along each of the dimensions and along several

    @staticmethod
    def of(mesh, rank: int) -> _Mesh | None:
        """None: the rank is not in it."""
        with unset_fake_temporarily():
            numbers = mesh.mesh.cpu()
            place = (numbers == rank).nonzero()
            if len(place) == 0:
                return None
            names = list(mesh.mesh_dim_names or (f"dim{i}" for i in range(mesh.ndim)))
            there = [i for i in range(mesh.ndim) if numbers.shape[i] > 1]
            lines: dict[Ranks, list[str]] = {}
            for count in range(1, len(there) + 1):
                for chosen in itertools.combinations(there, count):
                    index = tuple(slice(None) if i in chosen else place[0, i] for i in range(mesh.ndim))
                    ranks = tuple(sorted(numbers[index].flatten().tolist()))
                    lines.setdefault(ranks, [names[i] for i in chosen])
            groups: dict[str, list[str]] = {}
            for i in there:
                try:
                    groups.setdefault(mesh.get_group(i).group_name, [names[i]])
                except RuntimeError:  # a mesh without process groups
                    pass
        return _Mesh(names, mesh.mesh_dim_names is not None, groups, lines)


class Communicators:
    """entries: as in the document, in the order of their first use."""

    def __init__(self, batches: BatchDimensions | None = None, placed: frozenset[str] = frozenset()):
        """placed: dimensions that placements of parameters name."""
        self._placed = placed
        self.entries: list[dict] = []
        self._batches = batches or BatchDimensions()
        self._by_group: dict[tuple[str, bool], int] = {}
        self._by_ranks: dict[tuple[str, Ranks], int] = {}
        self._same: list[str] = []
        self._meshes: list[_Mesh] | None = None

    def of_group(self, group, exchanges: bool) -> int:
        """exchanges: each rank sends something else to each. Raises CollectiveProblem."""
        key = (group.group_name, exchanges)
        known = self._by_group.get(key)
        if known is None:
            ranks = tuple(sorted(dist.get_process_group_ranks(group)))
            names = self._names(group.group_name, ranks, exchanges)
            known = self._by_group[key] = self._entry("_".join(names), ranks, names)
        return known

    def add_placements(self, parameters: list[tuple[dict, torch.Tensor]]) -> None:
        """parameters: entries of the document, with their tensors. Raises TracerError."""
        for entry, parameter in parameters:
            for placed in entry.get("placements", ()):
                try:
                    self._add_placement(placed["mesh_dim"], placed["size"], parameter)
                except CollectiveProblem as error:
                    raise TracerError(f"parameter {entry['fqn']}: {error}") from error

    def same_batch(self) -> list[str]:
        return list(self._same)

    def _add_placement(self, name: str, size: int, parameter: nn.Parameter) -> None:
        if size == 1:
            if all(entry["name"] != name for entry in self.entries):
                self.entries.append({"name": name, "size": 1, "stride": 1})
            return
        own = [_Mesh.of(parameter.device_mesh, dist.get_rank())] if hasattr(parameter, "device_mesh") else []
        for mesh in (*filter(None, own), *self._known_meshes()):
            for ranks, names in mesh.lines.items():
                if names == [name] and len(ranks) == size:
                    self._entry(name, ranks, names)
                    return
        raise CollectiveProblem(f"no mesh that there is has the dimension {name} of {size} ranks")

    def _known_meshes(self, again: bool = False) -> list[_Mesh]:
        if self._meshes is None or again:
            rank = dist.get_rank()
            self._meshes = [found for mesh in known_meshes() if (found := _Mesh.of(mesh, rank)) is not None]
        return self._meshes

    def _names(self, group_name: str, ranks: Ranks, exchanges: bool) -> list[str]:
        """Names of the dimensions that the group is, the outermost first; its own where there is no mesh."""
        for again in (False, True):  # a model may make a mesh in its forward
            meshes = self._known_meshes(again)
            if found := [mesh.groups[group_name] for mesh in meshes if group_name in mesh.groups]:
                return min(found, key=lambda names: self._rank_of_name(names, exchanges))
            if found := [mesh.lines[ranks] for mesh in meshes if ranks in mesh.lines]:
                return min(found, key=lambda names: self._rank_of_name(names, exchanges))
        if named := [mesh.names for mesh in meshes if mesh.is_named]:
            raise CollectiveProblem(
                f"a collective among the ranks {_shown(ranks)} of {dist.get_world_size()}, which are no dimension of a "
                f"mesh, nor several ({'; '.join(', '.join(names) for names in named[:3])})"
            )
        is_all = len(ranks) == dist.get_world_size()
        return ["world" if is_all else "ranks_" + "_".join(map(str, ranks))]

    def _rank_of_name(self, names: list[str], exchanges: bool) -> tuple:
        """Dimensions of the same ranks may have one process group: of experts and of tensor parallelism, say. Tensor
        parallelism does not exchange, and the model communicates along dimensions that its parameters are cut along."""
        is_placed = any(name in self._placed for name in names)
        return len(names), (self._batches.is_same(names[0]) is True) == exchanges, not is_placed

    def _entry(self, name: str, ranks: Ranks, names: list[str]) -> int:
        key = (name, ranks)
        if key in self._by_ranks:
            return self._by_ranks[key]
        found = digits(ranks, dist.get_world_size())
        if found is None:
            raise CollectiveProblem(
                f"the ranks {_shown(ranks)} of {dist.get_world_size()} ({name}) are no digits of a rank's number: a "
                "trace says of a group how many ranks it has and how far apart they are"
            )
        self._note_batches(names, ranks)
        entry: dict = {
            "name": self._unused(name),
            "size": len(ranks),
            "stride": found[-1][1],
        }
        if len(found) > 1:
            entry["dims"] = [{"size": size, "stride": stride} for size, stride in found]
        self._by_ranks[key] = len(self.entries)
        self.entries.append(entry)
        return self._by_ranks[key]

    def _unused(self, name: str) -> str:
        taken = {entry["name"] for entry in self.entries}
        candidates = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2)))
        return next(candidate for candidate in candidates if candidate not in taken)

    def _note_batches(self, names: list[str], ranks: Ranks) -> None:
        for name in names:
            parts = [name]
            if self._batches.is_same(name) is None and len(names) == 1:
                parts = self._made_of(ranks) or parts
            for part in parts:
                same = self._batches.is_same(part)
                if same is None:
                    raise CollectiveProblem(
                        f"it is not known whether the ranks along {part} work on the same batch: --same-batch "
                        f"{part} (as in tensor parallelism), or --own-batch {part} (as in data parallelism)"
                    )
                if same and part not in self._same:
                    self._same.append(part)

    def _made_of(self, ranks: Ranks) -> list[str] | None:
        """Dimensions whose names say something, and which together have these ranks."""
        for mesh in self._known_meshes():
            names = mesh.lines.get(ranks, ())
            if len(names) > 1 and all(self._batches.is_same(name) is not None for name in names):
                return list(names)
        return None


def _shown(ranks: Ranks) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ..." if len(ranks) > 8 else shown
