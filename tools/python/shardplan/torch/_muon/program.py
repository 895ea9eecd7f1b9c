# SPDX-License-Identifier: Apache-2.0
"""A plan's exchanges and the instructions of its optimizer step, bound to a model's parameters and process groups."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from .._job.arguments import PlanError
from .._model.fit import ModelParameter
from .._parameters.rules import torch_dtype
from .pieces import Layout, Matrix, Part

_OF_EXCHANGES = ("update_copy_in", "all_to_all", "update_gather", "orthogonalize", "update_apply")


@dataclasses.dataclass(eq=False)
class Exchange:
    """One exchange as this rank sees it."""

    layout: Layout
    rank: int  # in the group
    group: dist.ProcessGroup
    dtype: torch.dtype
    parameters: list[nn.Parameter]  # by matrix

    def __post_init__(self) -> None:
        layout, rank = self.layout, self.rank
        self.pieces: list[Part] = layout.pieces(rank)
        self.whole: dict[int, list[Part]] = {number: [] for number in layout.of_owner(rank)}
        for part in layout.whole(rank):
            self.whole[part.matrix].append(part)
        self.results, self.sizes = layout.results(rank), layout.sizes(rank)
        self.there, self.back, self.sent_there = layout.there(rank), layout.back(rank), layout.sent_there(rank)
        self.replicas = layout.ranks // layout.shards


@dataclasses.dataclass(frozen=True)
class Buffer:
    name: str
    role: str
    exchange: Exchange


@dataclasses.dataclass(frozen=True)
class Instruction:
    """stream: position in the plan's list, the first of which is the one that computes."""

    kind: str
    stream: int = 0
    src: Buffer | None = None
    dst: Buffer | None = None
    event: str = ""
    exchange: Exchange | None = None
    matrix: int = 0
    safe_after: tuple[int, ...] = ()
    parameter: nn.Parameter | None = None  # optimizer_step: one that stays sharded


@dataclasses.dataclass(frozen=True, eq=False)
class Beginning:
    """Instructions of the backward with which exchanges begin.

    reductions: how often each of their parameters has had a gradient reduced in a step then, by id."""

    instructions: list[Instruction]
    parameters: list[nn.Parameter]
    reductions: dict[int, int]


@dataclasses.dataclass(frozen=True)
class Program:
    """parameters: those that Muon steps, by FQN, in the order of the plan's units."""

    parameters: dict[str, nn.Parameter]
    stream_priorities: list[int]
    in_backward: list[Beginning]  # in the plan's order
    instructions: list[Instruction]  # of the optimizer's step


def _find(table: list[Any], reference: str | int, key: str = "name") -> int:
    """Position of the element that a document names, or gives by its position."""
    if isinstance(reference, int):
        return reference
    return next(i for i, row in enumerate(table) if (row if isinstance(row, str) else row[key]) == reference)


def _check_sharded(where: str, parameter: Any, planned: list[int]) -> None:
    if not isinstance(parameter, DTensor):
        raise PlanError(f"{where}: expected a sharded parameter (a DTensor), found a {type(parameter).__name__}")
    if len(planned) < 2 or parameter.ndim < 2:
        raise PlanError(
            f"{where}: its shape is {list(parameter.shape)}, and Muon steps matrices; torch.optim.AdamW steps others"
        )


def _check_placement(where: str, parameter: Any, planned: list[int], matrix: Matrix, shard: int, shards: int) -> None:
    """Has this rank the rows of the parameter that the plan says?"""
    sharded = [
        (size, placement.dim)
        for size, placement in zip(parameter.device_mesh.shape, parameter.placements)
        if isinstance(placement, (Shard, _StridedShard))
    ]
    by_fsdp_alone = math.prod(size for size, _ in sharded) == shards
    # Experts may be cut over other ranks, too, since each of them is whole somewhere.
    if any(dim != 0 for _, dim in sharded) or (parameter.ndim == 2 and not by_fsdp_alone):
        raise PlanError(
            f"{where}: placements expected Shard(0) over {shards} ranks, found {parameter.placements} on "
            f"{list(parameter.device_mesh.shape)}"
        )
    if by_fsdp_alone and list(parameter.shape) != planned:
        raise PlanError(f"{where}: shape expected {planned}, found {list(parameter.shape)}")
    (begin, end), height = matrix.rows_of_shard(shard, shards), math.prod(planned[1:-1])
    expected, found = [(end - begin) // height, *planned[1:]], list(parameter._local_tensor.shape)
    if expected != found:
        raise PlanError(f"{where}: shape of this rank's part expected {expected}, found {found}")
    offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)[1]
    if by_fsdp_alone and begin < end and offset[0] * height != begin:
        raise PlanError(f"{where}: first row of this rank's part expected {begin}, found {offset[0] * height}")


def _check_rows(fqn: str, matrices: list[Matrix]) -> None:
    """Is each row of the parameter in one matrix?"""
    end = 0
    for matrix in sorted(matrices, key=lambda matrix: matrix.first_row):
        if matrix.first_row != end:
            apart = matrix.first_row > end
            rows = f"rows {end} to {matrix.first_row}" if apart else f"row {matrix.first_row}"
            raise PlanError(f"parameter {fqn}: {rows} in {'no matrix' if apart else 'two matrices'} of the exchanges")
        end += matrix.rows
    height = math.prod(matrices[0].shape[:-1])
    if end != height:
        raise PlanError(f"parameter {fqn}: rows {end} to {height} in no matrix of the exchanges")


class _Binding:
    """Reads a plan's document with a model's parameters at hand."""

    def __init__(self, document: dict, by_fqn: dict[str, ModelParameter], groups: Sequence[dist.ProcessGroup]) -> None:
        self.document, self.groups = document, groups
        self.parameters: dict[str, Any] = {}
        self.matrices: dict[str, list[Matrix]] = {}
        for unit in document["units"]:
            for planned in unit["parameters"]:
                if not planned.get("muon"):
                    continue
                where = f"parameter {planned['fqn']}"
                if planned["fqn"] not in by_fqn:
                    raise PlanError(f"{where}: expected by the plan, not in the model")
                parameter: Any = by_fqn[planned["fqn"]].parameter
                _check_sharded(where, parameter, planned["shape"])
                self.parameters[planned["fqn"]] = parameter

    def _planned(self, entry: dict) -> tuple[dict, dict]:
        """The unit and the parameter of a matrix, or of an instruction."""
        units = self.document["units"]
        unit = units[_find(units, entry["unit"], "fqn")]
        return unit, unit["parameters"][entry["parameter"]]

    def exchange(self, description: dict) -> Exchange:
        communicators = self.document["communicators"]
        number = _find(communicators, description["communicator"])
        group, ranks = self.groups[number], communicators[number]["size"]
        matrices, parameters, all_shards = [], [], set()
        for entry in description["matrices"]:
            unit, planned = self._planned(entry)
            fqn, shape = planned["fqn"], planned["shape"]
            where = f"parameter {fqn} (exchange {description['name']})"
            if fqn not in self.parameters:
                raise PlanError(f"{where}: Muon does not step it in this plan")
            owner = entry.get("owner")
            if owner is not None and not 0 <= owner < ranks:
                raise PlanError(f"{where}: its owner is rank {owner} of the {ranks} ranks that exchange")
            over = unit.get("shard_communicator")
            shards = 1 if over is None else communicators[_find(communicators, over)]["size"]
            rows = entry.get("rows") or math.prod(shape[:-1])
            matrix = Matrix(tuple(shape), owner, entry.get("first_row", 0), rows)
            _check_placement(where, self.parameters[fqn], shape, matrix, group.rank() % shards, shards)
            all_shards.add(shards)
            matrices.append(matrix)
            parameters.append(self.parameters[fqn])
            self.matrices.setdefault(fqn, []).append(matrix)
        if len(all_shards) > 1 or ranks % max(all_shards):
            sharded = " and ".join(map(str, sorted(all_shards)))
            raise PlanError(f"exchange {description['name']}: over {ranks} ranks, of parameters over {sharded}")
        if len({matrix.owner is None for matrix in matrices}) > 1:
            raise PlanError(f"exchange {description['name']}: some of its matrices have an owner, and some have none")
        dtype = torch_dtype(description.get("dtype", "bfloat16"))
        return Exchange(Layout(tuple(matrices), ranks, all_shards.pop()), group.rank(), group, dtype, parameters)

    def program(self, exchanges: dict[str, Exchange]) -> Program:
        """Muon's instructions: exchanges, their buffers, their order between streams, and steps of matrices that stay
        sharded."""
        document = self.document
        steady = document["steps"][document.get("steady_step", 0)]
        triggers = [trigger for trigger in steady["triggers"] if trigger.get("instructions")]
        roles = {buffer["name"]: buffer["role"] for buffer in document["buffers"]}
        unit_of_gradient = {b["name"]: b["unit"] for b in document["buffers"] if b["role"] == "grad_sharded"}
        buffers: dict[str, Buffer] = {}
        for entry in (entry for trigger in triggers for entry in trigger["instructions"]):
            if entry["kind"] in _OF_EXCHANGES:
                for name in filter(None, (entry.get("src"), entry.get("dst"))):
                    buffers[name] = Buffer(name, roles[name], exchanges[entry["exchange"]])

        def made(written: list[dict], events: set[str]) -> list[Instruction]:
            def is_ours(entry: dict) -> bool:
                if entry["kind"] in ("allocate", "free"):
                    return entry.get("dst", entry.get("src")) in buffers
                if entry["kind"] in ("record", "wait", "host_wait"):
                    return entry["event"] in events
                if entry["kind"] == "optimizer_step":
                    return "parameter" in entry and self._planned(entry)[1]["fqn"] in self.parameters
                return entry["kind"] in _OF_EXCHANGES

            return [self._instruction(entry, buffers, exchanges) for entry in written if is_ours(entry)]

        beginnings: list[Beginning] = []
        recorded: set[str] = set()  # the runtime has waited for the backward's other events
        reductions: dict[str, int] = {}
        in_step: list[dict] = []
        for trigger in triggers:
            written = trigger["instructions"]
            if trigger.get("kind") == "optimizer_step":
                in_step = in_step or written
                continue
            made_of = {unit_of_gradient.get(e.get("dst")) for e in written if e["kind"] not in ("allocate", "free")}
            for unit in made_of - {None}:
                reductions[unit] = reductions.get(unit, 0) + 1
            ours = {entry.get("stream", 0) for entry in written if entry["kind"] in _OF_EXCHANGES}
            if not ours:
                continue
            events = {e["event"] for e in written if e["kind"] in ("record", "wait") and e.get("stream", 0) in ours}
            recorded |= {e["event"] for e in written if e["kind"] == "record"} & events
            begun = {entry["exchange"] for entry in written if entry["kind"] in _OF_EXCHANGES}
            counts = {
                id(self.parameters[planned["fqn"]]): reductions.get(unit["fqn"], 1)
                for name in begun
                for unit, planned in self._members(name)
            }
            own = list({id(p): p for name in sorted(begun) for p in exchanges[name].parameters}.values())
            beginnings.append(Beginning(made(written, events), own, counts))
        recorded |= {entry["event"] for entry in in_step if entry["kind"] == "record"}
        return Program(
            self.parameters,
            [stream.get("priority", 0) for stream in document["streams"]],
            beginnings,
            made(in_step, recorded),
        )

    def _members(self, exchange: str) -> list[tuple[dict, dict]]:
        """Units and parameters of an exchange's matrices."""
        exchanges = self.document["exchanges"]
        return [self._planned(entry) for entry in exchanges[_find(exchanges, exchange)]["matrices"]]

    def _instruction(self, entry: dict, buffers: dict[str, Buffer], exchanges: dict[str, Exchange]) -> Instruction:
        streams, kind = self.document["streams"], entry["kind"]
        return Instruction(
            kind,
            _find(streams, entry.get("stream", 0)),
            buffers.get(entry.get("src", "")),
            buffers.get(entry.get("dst", "")),
            entry.get("event", ""),
            exchanges.get(entry.get("exchange", "")),
            entry.get("matrix", 0),
            tuple(_find(streams, stream) for stream in entry.get("safe_after", ())),
            self.parameters[self._planned(entry)[1]["fqn"]] if kind == "optimizer_step" else None,
        )


def bind(plan, by_fqn: dict[str, ModelParameter], groups: Sequence[dist.ProcessGroup]) -> Program:
    """groups: by the plan's communicators. Raises PlanError, naming the parameter, where plan and model differ."""
    document = json.loads(plan.json)
    binding = _Binding(document, by_fqn, groups)
    if not binding.parameters:
        raise PlanError(
            "the plan has no matrices for Muon: trace the model with `--muon RANKS`, and plan with `--optimizer muon "
            "--muon-owners shards`"
        )
    exchanges = {description["name"]: binding.exchange(description) for description in document.get("exchanges", ())}
    for fqn, matrices in binding.matrices.items():
        _check_rows(fqn, matrices)
    program = binding.program(exchanges)
    alone = {id(instruction.parameter) for instruction in program.instructions}
    for fqn, parameter in program.parameters.items():
        if fqn not in binding.matrices and id(parameter) not in alone:
            raise PlanError(f"parameter {fqn}: Muon steps it, and no instruction of the optimizer's step does")
    return program
