# SPDX-License-Identifier: Apache-2.0
"""Recordings of the optimizer states of real FSDP1: full, sharded and local state dicts, reproduced value for value and
slice for slice.

A case is a folder with layout.json (which parameters each unit flattens), local_optim_state.rank<r>.pt (what each
rank's optimizer has), full_optim_state.pt and sharded_optim_state.rank<r>.pt. Here the ranks' slices follow from the
shapes of the parameters by FSDP1's rules of padding and alignment. Plans of resharding take the local states to the
full and the sharded ones, and the full ones back.
"""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from shardplan.command import EXIT_ENVIRONMENT, printable, printable_name
from shardplan.reshard import ReshardError, plan, runs

_ALIGNMENT_BYTES = 16  # of original parameters in a flat one
_MESH_DIM = "shard"

State = dict[str, dict[str, torch.Tensor]]  # state name -> by parameter


class BadRecording(Exception):
    """A file is missing or is not what it has to be."""


class Differs(Exception):
    """shardplan's state differs from FSDP1's."""


@dataclass
class Parameter:
    name: str
    shape: list[int]
    unit: int
    offset: int  # elements before it in the flat parameter

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


class Recording:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.layout = json.loads((folder / "layout.json").read_text())
            self.ranks = int(self.layout["world_size"])
            self.original = bool(self.layout["use_orig_params"])
            self.units = self.layout["ranks"][0]["units"]
            self.names = [[p["fqn"] for p in unit["params"]] for unit in self.units]
        except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise BadRecording(f"{folder / 'layout.json'}: cannot be read: {error!r}") from error
        if len(self.layout["ranks"]) != self.ranks:
            raise BadRecording(
                f"{folder / 'layout.json'}: {len(self.layout['ranks'])} ranks, expected world_size {self.ranks}"
            )

    def load(self, name: str) -> dict:
        path = self.folder / name
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise BadRecording(f"{path}: cannot be read: {error}") from error

    @cached_property
    def full(self) -> dict:
        return self.load("full_optim_state.pt")

    @cached_property
    def local(self) -> list[dict]:
        return [self.load(f"local_optim_state.rank{rank}.pt") for rank in range(self.ranks)]

    @cached_property
    def sharded(self) -> list[dict]:
        return [self.load(f"sharded_optim_state.rank{rank}.pt") for rank in range(self.ranks)]

    @cached_property
    def dtype(self) -> torch.dtype:
        found = [
            v.dtype
            for of in self.full["state"].values()
            for v in of.values()
            if isinstance(v, torch.Tensor) and v.dim() > 0
        ]
        return found[0] if found else torch.float32

    @cached_property
    def parameters(self) -> list[Parameter]:
        """In the order of the flat parameters, each behind the one before it and as many elements as it takes to be
        aligned."""
        aligned = _ALIGNMENT_BYTES // self.dtype.itemsize if self.original else 1
        found = []
        for index, unit in enumerate(self.units):
            end = 0
            for p in unit["params"]:
                parameter = Parameter(p["fqn"], p["shape"], index, -(-end // aligned) * aligned)
                end = parameter.offset + parameter.numel
                found.append(parameter)
        return found

    def flat_numel(self, unit: int) -> int:
        """Padded to a multiple of the ranks."""
        end = max((p.offset + p.numel for p in self.parameters if p.unit == unit), default=0)
        return -(-end // self.ranks) * self.ranks

    def slice_of(self, parameter: Parameter, rank: int) -> tuple[int, int, int]:
        """(offset in the rank's shard, elements, first element of the parameter)."""
        shard = self.flat_numel(parameter.unit) // self.ranks
        first = max(parameter.offset, rank * shard)
        last = min(parameter.offset + parameter.numel, (rank + 1) * shard)
        return (first - rank * shard, last - first, first - parameter.offset) if last > first else (0, 0, 0)

    # ---- layout documents ----

    def _document(self, tensors: list[dict], flats: list[dict], ranks: int) -> dict:
        return {
            "name": self.folder.name, "mesh": [{"name": _MESH_DIM, "size": ranks}], "flats": flats, "tensors": tensors,
        }

    def _tensor(self, parameter: Parameter, **placement) -> dict:
        return {
            "name": parameter.name, "dtype": str(self.dtype).removeprefix("torch."), "shape": parameter.shape,
            **placement,
        }

    def flat_layout(self) -> dict:
        dtype = str(self.dtype).removeprefix("torch.")
        units = [(unit["unit"], self.flat_numel(i)) for i, unit in enumerate(self.units)]
        flats = [{"name": name, "dtype": dtype, "numel": numel, "mesh_dims": [_MESH_DIM]} for name, numel in units]
        return self._document(
            [self._tensor(p, flat=p.unit, flat_offset=p.offset) for p in self.parameters], flats, self.ranks
        )

    def full_layout(self) -> dict:
        only = [{"mesh_dim": _MESH_DIM, "index": 0}]
        return self._document([self._tensor(p, only=only) for p in self.parameters], [], self.ranks)

    def sharded_layout(self) -> dict:
        rows = [{"mesh_dims": [_MESH_DIM], "tensor_dim": 0}]
        return self._document(
            [self._tensor(p, splits=rows if p.shape else []) for p in self.parameters], [], self.ranks
        )

    # ---- what the optimizers have ----

    @cached_property
    def ids(self) -> list[list[str]]:
        """The parameters that each id of the ranks' optimizers stands for."""
        if not self.original:
            return self.names
        known = {name for names in self.names for name in names}
        return [[name] for name in self.load("full_model_state.pt") if name in known]

    def shards(self, state: str) -> list[list[torch.Tensor]]:
        """By rank and unit: the rank's piece of the flat parameter's state."""
        by_name = {p.name: p for p in self.parameters}
        result = []
        for rank, local in enumerate(self.local):
            shards = [torch.zeros(self.flat_numel(u) // self.ranks, dtype=self.dtype) for u in range(len(self.units))]
            for index, names in enumerate(self.ids):
                value = local["state"].get(index, {}).get(state)
                parameter = by_name[names[0]]
                offset, numel = (
                    (0, len(shards[parameter.unit])) if not self.original else self.slice_of(parameter, rank)[:2]
                )
                have = 0 if value is None else value.numel()
                if have != numel:
                    raise Differs(
                        f"rank {rank} has {have} elements of {state} of {names[0]}, shardplan's slice has {numel}"
                    )
                if numel > 0:
                    shards[parameter.unit][offset : offset + numel] = value.reshape(-1)
            result.append(shards)
        return result

    def states(self) -> list[str]:
        """Names of states that are cut like their parameter."""
        named = {
            k
            for of in self.full["state"].values()
            for k, v in of.items()
            if isinstance(v, torch.Tensor) and v.dim() > 0
        }
        return sorted(named)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _expect(found: object, wanted: object, what: str) -> None:
    if found != wanted:
        raise Differs(f"{what}: shardplan {found}, FSDP1 {wanted}")


def _expect_equal(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    _expect((found.dtype, tuple(found.shape)), (wanted.dtype, tuple(wanted.shape)), what)
    if not torch.equal(_bytes(found.contiguous()), _bytes(wanted.contiguous())):
        raise Differs(f"{what}: other values than FSDP1's")


def _compare_slices(recording: Recording, to_full: dict) -> None:
    """The runs of the plan to the full state are the slices that FSDP1 gave its ranks."""
    size = recording.dtype.itemsize
    slices = {(name, rank): (s // size, n // size, t // size) for name, rank, _, s, t, n in runs(to_full)}
    for rank, of_rank in enumerate(recording.layout["ranks"]):
        for index, unit in enumerate(of_rank["units"]):
            where = f"rank {rank}, unit {unit['unit']}"
            numel = recording.flat_numel(index)
            _expect(numel, unit["padded_unsharded_numel"], f"{where}: padded_unsharded_numel")
            _expect(numel // recording.ranks, unit["shard_numel"], f"{where}: shard_numel")
            _expect(rank * (numel // recording.ranks), unit["shard_start"], f"{where}: shard_start")
            for p in unit["params"]:
                found = slices.get((p["fqn"], rank))
                wanted = (p["offset_in_shard"], p["numel_in_shard"], p["param_start"]) if p["in_shard"] else None
                _expect(found, wanted, f"{where}: the slice of {p['fqn']}")


def _compare_full(recording: Recording, to_full: dict, state: str, shards: list[list[torch.Tensor]]) -> None:
    units = {p.name: p.unit for p in recording.parameters}
    made = {p.name: torch.empty(p.shape, dtype=recording.dtype) for p in recording.parameters}
    for name, source, _, s, t, n in runs(to_full):
        _bytes(made[name])[t : t + n] = _bytes(shards[source][units[name]])[s : s + n]
    for name, value in made.items():
        _expect_equal(value, recording.full["state"][name][state], f"{state} of {name}")


def _compare_sharded(recording: Recording, to_sharded: dict, state: str, shards: list[list[torch.Tensor]]) -> None:
    units = {p.name: p.unit for p in recording.parameters}
    made: dict[tuple[str, int], torch.Tensor] = {}
    places: dict[tuple[str, int], list[int]] = {}
    for p in recording.parameters:
        rows = p.shape[0] if p.shape else 1
        each = -(-rows // recording.ranks)
        for rank in range(recording.ranks):
            first = min(rows, rank * each)
            made[p.name, rank] = torch.empty([min(rows, first + each) - first, *p.shape[1:]], dtype=recording.dtype)
            places[p.name, rank] = [first, *[0] * (len(p.shape) - 1)]
    for name, source, target, s, t, n in runs(to_sharded):
        _bytes(made[name, target])[t : t + n] = _bytes(shards[source][units[name]])[s : s + n]
    for (name, rank), value in made.items():
        wanted = recording.sharded[rank]["state"][name][state]
        what = f"{state} of {name}, sharded, rank {rank}"
        local = next(iter(wanted["local"]), {})
        if value.numel() == 0:
            have = local.get("tensor")
            _expect(0, 0 if have is None else have.numel(), what)
            continue
        if "offsets" in local:
            _expect(places[name, rank], list(local["offsets"]), f"{what}: offsets")
            shards_of = [
                [places[name, r], list(made[name, r].shape)]
                for r in range(recording.ranks)
                if made[name, r].numel() > 0
            ]
            _expect(
                shards_of,
                [[list(of["offsets"]), list(of["sizes"])] for of in wanted["all_shards"]],
                f"{what}: all shards",
            )
        _expect_equal(value, local["tensor"], what)


def _compare_back(recording: Recording, from_full: dict, state: str, shards: list[list[torch.Tensor]]) -> None:
    units = {p.name: p.unit for p in recording.parameters}
    made = [[torch.zeros_like(shard) for shard in of] for of in shards]
    for name, _, target, s, t, n in runs(from_full):
        _bytes(made[target][units[name]])[t : t + n] = _bytes(recording.full["state"][name][state].contiguous())[
            s : s + n
        ]
    for rank, of in enumerate(made):
        for unit, shard in zip(recording.units, of):
            _expect_equal(
                shard, shards[rank][recording.units.index(unit)], f"{state} of unit {unit['unit']} on rank {rank}, back"
            )


def _compare_others(recording: Recording) -> None:
    """Compares states that are no slice (`step`), and the parameter groups with their hyperparameters."""
    sliced = set(recording.states())
    for index, names in enumerate(recording.ids):
        own = next((local["state"][index] for local in recording.local if index in local["state"]), {})
        for name in names:
            for dicts, what in ((recording.full, "full"), *((of, "sharded") for of in recording.sharded)):
                wanted = dicts["state"].get(name, {})
                _expect(sorted(own), sorted(wanted), f"the states of {name}, {what}")
                for key in own.keys() - sliced:
                    if isinstance(own[key], torch.Tensor):
                        _expect_equal(own[key], wanted[key], f"{key} of {name}, {what}")
                    else:
                        _expect(own[key], wanted[key], f"{key} of {name}, {what}")
    _expect(
        {n for names in recording.ids for n in names}, set(recording.full["state"]), "the parameters of the full state"
    )
    groups = [
        {**g, "params": [n for i in g["params"] for n in recording.ids[i]]} for g in recording.local[0]["param_groups"]
    ]
    _expect(groups, recording.full["param_groups"], "param_groups")


def compare(folder: Path, program: str | Path) -> int:
    """How many values were compared. Differs, BadRecording or ReshardError where they cannot be, or are others."""
    recording = Recording(folder)
    try:
        flat = recording.flat_layout()
        to_full = plan(program, flat, recording.full_layout())
        to_sharded = plan(program, flat, recording.sharded_layout())
        from_full = plan(program, recording.full_layout(), flat)
        _compare_slices(recording, to_full)
        _compare_others(recording)
        for state in recording.states():
            shards = recording.shards(state)
            _compare_full(recording, to_full, state, shards)
            _compare_sharded(recording, to_sharded, state, shards)
            _compare_back(recording, from_full, state, shards)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise BadRecording(f"{folder}: a state dict is not what a recording has: {error!r}") from error
    return len(recording.parameters) * (len(recording.states()) * (recording.ranks + 2) + 1)


def run(folder: Path, program: str, wanted: list[str]) -> int:
    """The exit code."""
    names = sorted(path.parent.name for path in folder.glob("*/layout.json"))
    missing = [name for name in wanted if name not in names]
    if missing:
        print(
            printable(f"shardplan conformance: {folder}: the folder has no recording {printable_name(missing[0])}"),
            file=sys.stderr,
        )
        return 3
    chosen = [name for name in names if not wanted or name in wanted]
    matched, code = 0, 0
    for name in chosen:
        try:
            print(printable(f"{printable_name(name)}: matches ({compare(folder / name, program)} values)"), flush=True)
            matched += 1
        except Differs as error:
            print(printable(f"{printable_name(name)}: differs at {error}"), flush=True)
            code = code or 1
        except BadRecording as error:
            print(printable(f"shardplan conformance: {error}"), file=sys.stderr)
            code = 3
        except ReshardError as error:
            print(printable(f"shardplan conformance: {error}"), file=sys.stderr)
            return EXIT_ENVIRONMENT
    print(f"matched {matched} of {len(chosen)} cases")
    return code
