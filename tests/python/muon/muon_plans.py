# SPDX-License-Identifier: Apache-2.0
"""Plan documents with exchanges, written here. Matrices go to owners by longest processing time first. While one unit
is iterated, the exchange of the next one comes and that of the last one goes. Without owners all ranks gather them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

Shapes = dict[str, dict[str, tuple[int, ...]]]  # parameters of each unit, by FQN


@dataclasses.dataclass(frozen=True)
class Communicator:
    name: str
    ranks: tuple[tuple[int, ...], ...]  # its groups

    def group_of(self, rank: int) -> list[int]:
        return next(list(group) for group in self.ranks if rank in group)


@dataclasses.dataclass(frozen=True)
class WrittenPlan:
    """The part of a plan that sp.Muon reads."""

    json: str
    world_size: int
    communicators: list[Communicator]


def matrices_of(shape: Sequence[int]) -> list[dict]:
    """A parameter of three dimensions is a matrix for each expert."""
    if len(shape) == 2:
        return [{}]
    return [{"first_row": expert * shape[1], "rows": shape[1]} for expert in range(shape[0])]


def _work(shape: Sequence[int]) -> int:
    rows, columns = sorted(shape[-2:])
    return rows * rows * (2 * columns + rows)


def _exchanges(units: Shapes, ranks: int, dtype: str, units_each: int, owned: bool) -> list[dict]:
    loads = [0] * ranks
    names = list(units)
    made = []
    for number, first in enumerate(range(0, len(names), units_each)):
        entries = [
            (_work(shape), {"unit": name, "parameter": index, **part})
            for name in names[first : first + units_each]
            for index, shape in enumerate(units[name].values())
            for part in matrices_of(shape)
        ]
        for work, entry in sorted(entries, key=lambda entry: -entry[0]) if owned else ():
            entry["owner"] = loads.index(min(loads))
            loads[entry["owner"]] += work
        matrices = [entry for _, entry in entries]
        made.append({"name": f"muon.{number}", "communicator": "exchange", "dtype": dtype, "matrices": matrices})
    return made


def _instructions(exchanges: list[dict], owned: bool) -> list[dict]:
    lines: list[dict] = []

    def add(kind: str, stream: str, number: int | None = None, **operands) -> None:
        own = {} if number is None else {"exchange": exchanges[number]["name"]}
        lines.append({"kind": kind, "stream": stream, **own, **operands})

    def after(event: str, recorder: str, waiter: str) -> None:
        add("record", recorder, event=event)
        add("wait", waiter, event=event)

    def there(number: int) -> None:
        for buffer in ("pieces", "whole"):
            add("allocate", "compute", dst=f"{buffer}.{number}")
        add("update_copy_in", "compute", number, dst=f"pieces.{number}")
        after(f"copied.{number}", "compute", "exchange")
        kind = "all_to_all" if owned else "update_gather"
        add(kind, "exchange", number, src=f"pieces.{number}", dst=f"whole.{number}", communicator="exchange")
        add("record", "exchange", event=f"there.{number}")

    def apply(number: int) -> None:
        if owned:
            add("wait", "compute", event=f"back.{number}")
        add("update_apply", "compute", number, src=f"{'pieces' if owned else 'whole'}.{number}")
        for buffer in ("pieces", "whole"):
            lines.append({"kind": "free", "src": f"{buffer}.{number}"})

    last = len(exchanges) - 1
    there(0)
    for number, exchange in enumerate(exchanges):
        if number < last:
            there(number + 1)
        add("wait", "compute", event=f"there.{number}")
        for matrix in range(len(exchange["matrices"])):
            add("orthogonalize", "compute", number, dst=f"whole.{number}", matrix=matrix, segment=f"ns.{matrix}")
        if owned:
            after(f"whole.{number}", "compute", "exchange")
            add(
                "all_to_all", "exchange", number, src=f"whole.{number}", dst=f"pieces.{number}",
                communicator="exchange",
            )
            add("record", "exchange", event=f"back.{number}")
        if number > 0:
            apply(number - 1)
    apply(last)
    return [*lines, {"kind": "optimizer_step", "stream": "compute"}]


def document(
    units: Shapes, shards: int, replicas: int = 1, over_replicas: bool = True, dtype: str = "bfloat16",
    units_each: int = 1, owned: bool = True,
) -> dict:
    """over_replicas: owners are ranks of all replicas. owned: matrices have owners."""
    group = shards * (replicas if over_replicas and owned else 1)
    exchanges = _exchanges(units, group, dtype, units_each, owned)
    communicators = [{"name": "shard", "size": shards}, {"name": "exchange", "size": group}]
    described = [
        {
            "fqn": name, "modules": [name], "shard_communicator": "shard",
            "parameters": [{"fqn": fqn, "shape": list(shape), "muon": True} for fqn, shape in of_unit.items()],
        }
        for name, of_unit in units.items()
    ]
    buffers = [
        {"name": f"{short}.{number}", "role": f"update_{short}", "dtype": dtype}
        for number in range(len(exchanges))
        for short in ("pieces", "whole")
    ]
    triggers = [{"kind": "step_begin", "instructions": []}, {"kind": "optimizer_step"}, {"kind": "step_end"}]
    triggers[1]["instructions"] = _instructions(exchanges, owned)
    return {
        "units": described, "buffers": buffers, "communicators": communicators, "exchanges": exchanges,
        "streams": [{"name": "compute"}, {"name": "exchange", "priority": -1}],
        "steps": [{"name": "steady", "triggers": triggers}],
    }


def written(made: dict, ranks: int) -> WrittenPlan:
    """The plan of a document, on ranks that are replicas x shards."""
    communicators = []
    for communicator in made["communicators"]:
        size = communicator["size"]
        groups = tuple(tuple(range(first, first + size)) for first in range(0, ranks, size))
        communicators.append(Communicator(communicator["name"], groups))
    return WrittenPlan(json.dumps(made), ranks, communicators)
