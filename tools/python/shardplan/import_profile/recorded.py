# SPDX-License-Identifier: Apache-2.0
"""Recordings that a plan's own runtime makes (`shardplan.torch.profile`, `shardplan run --profile`): the same objects
as a profile of torch.profiler gives.

A recording says of each instruction of a step when the host was in it and when its work was done in its stream, on the
host's clock. So nothing has to be guessed: the part that work belongs to is the plan's.
"""

from __future__ import annotations

import itertools
import json
import statistics

from .kineto import BadProfile, Collective, Profile, Work
from .parts import ROOT, Part
from .snapshot import Memory

_SCHEMA = "shardplan.recording/1"
_MARK = b'{"schema":"shardplan.recording/'
_PHASES = {
    "forward": "forward", "loss": "forward", "backward": "backward", "recompute": "backward", "optimizer": "optimizer",
}


def is_recording(data: bytes) -> bool:
    return data.startswith(_MARK)


def document_of(path: str, data: bytes, plan_digest: str) -> dict:
    """Reads a recording of that plan. Raises BadProfile."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadProfile(f"{path}: {error} (expected a recording, {_SCHEMA}; is the file whole?)") from error
    if document.get("schema") != _SCHEMA:
        raise BadProfile(f"{path}: /schema: found {document.get('schema')}, expected {_SCHEMA}")
    if document.get("plan_digest") != plan_digest:
        raise BadProfile(
            f"{path}: /plan_digest: a recording of another plan (found {document.get('plan_digest')}, expected "
            f"{plan_digest} of --plan)"
        )
    return document


def _unit(plan: dict, number: int) -> str:
    return "" if number < 0 else plan["units"][number].get("fqn", "") or ROOT


def _trigger_text(plan: dict, trigger: list) -> str:
    kind, unit, microbatch, _ = trigger
    return f"{kind} {_unit(plan, unit)}".strip() + (f" (micro-batch {microbatch})" if microbatch else "")


def _shares(rows: list[list], planned: list[list]) -> list[tuple[int, int]]:
    """Begin and end of each row's work; rows of one span (collectives launched as one, segments of one trigger) take
    turns in it, by their bytes."""
    times = []
    for span, group in itertools.groupby(zip(rows, planned), key=lambda pair: pair[0][4]):
        members = list(group)
        begin, end = members[0][0][5], members[0][0][6]
        if span < 0 or len(members) == 1:
            times += [(row[5], row[6]) for row, _ in members]
            continue
        weights = [max(1, instruction[4]) for _, instruction in members]
        edges = [begin + (end - begin) * sum(weights[:i]) // sum(weights) for i in range(len(members) + 1)]
        times += itertools.pairwise(edges)
    return times


def _work(instruction: list, row: list, times: tuple[int, int], plan: dict, groups: list) -> Work:
    kind, unit, stream, communicator, bytes_, phase = instruction
    collective = Collective(kind, tuple(groups[communicator]), bytes_) if communicator >= 0 else None
    name = _unit(plan, unit)
    if not phase:
        part = Part("communication", name, kind)
    else:
        part = Part("optimizer", "", "optimizer") if phase == "optimizer" else Part(_PHASES[phase], name, "segment")
    stream_name = plan["streams"][max(stream, 0)].get("name", "compute")
    return Work(*times, max(stream, 0), kind, row[2], collective=collective, part=part, stream_name=stream_name)


def _instruction_rows(
    step: dict, planned: list[list], times: list[tuple[int, int]], document: dict, plan: dict
) -> list[dict]:
    """Rows of the report, with times from the begin of the step."""
    begin = step["begin_ns"]
    rows = []
    for row, instruction, (from_ns, to_ns) in zip(step["instructions"], planned, times):
        kind, unit, stream = instruction[:3]
        entry = {"trigger": _trigger_text(plan, document["triggers"][row[0]]), "kind": kind, "unit": _unit(plan, unit)}
        entry |= {"host_begin_ns": row[2] - begin, "host_end_ns": row[3] - begin}
        if row[4] >= 0:
            # The device's clock may be some microseconds off the host's.
            entry |= {
                "stream": plan["streams"][max(stream, 0)].get("name", ""), "begin_ns": max(0, from_ns - begin),
                "end_ns": max(0, to_ns - begin),
            }
        rows.append(entry | {"allocated_bytes": row[7]})
    return rows


def _blocked(rows: list[list], planned: list[list], on_host: bool) -> list[tuple[int, int]]:
    """The host waits. On the CPU what comes next in a stream waits for what is in flight there, too."""
    found = []
    for row, instruction in zip(rows, planned):
        if instruction[0] == "host_wait" or (on_host and instruction[0] == "wait"):
            found.append((row[2], row[3]))
        elif on_host and row[4] >= 0 and row[5] < row[3]:
            found.append((row[2], row[5]))
    return [(begin, end) for begin, end in found if begin < end]


def _memory(document: dict, plan: dict, step: dict) -> Memory:
    categories = dict(step["peak_by_category"])
    if (rest := step["peak_bytes"] - sum(categories.values())) > 0:
        categories["model"] = rest
    return Memory(
        peak_bytes=step["peak_bytes"],
        steady_bytes=step["steady_bytes"],
        reserved_bytes=document["reserved_bytes"],
        cache_releases=document["cache_releases"],
        out_of_memory=False,
        peak_at=_trigger_text(plan, document["triggers"][step["peak_trigger"]]),
        by_category=tuple(sorted(categories.items())),
    )


def cost_ns(document: dict) -> int | None:
    """Time that recording adds to a step. None: there is nothing to compare with."""
    recorded = [step["device_end_ns"] - step["device_begin_ns"] for step in document["steps"]]
    if not recorded or not document["unrecorded_steps_ns"]:
        return None
    return round(statistics.median(recorded) - statistics.median(document["unrecorded_steps_ns"]))


def cost_text(document: dict) -> str:
    """For people."""
    cost, between = cost_ns(document), document["unrecorded_steps_ns"]
    if cost is None:
        return "what recording costs was not measured: no step passed without it"
    plain = statistics.median(between)
    spread = max(between) - min(between)
    return (
        f"recording costs {cost / 1e6:.3f} ms a step ({100 * cost / plain:.2f} %): median of {len(document['steps'])} "
        f"recorded steps less that of {len(between)} between them, "
        f"which differ by {spread / 1e6:.3f} ms"
    )


def profile_of(path: str, document: dict, plan: dict) -> Profile:
    """Raises BadProfile."""
    if not document.get("steps"):
        raise BadProfile(
            f"{path}: no step was recorded up to the begin of the next one (found 0, and {document.get('abandoned')} "
            "that left the plan or were given up; "
            "expected at least 1 of those that repeat)"
        )
    try:
        return _profile(path, document, plan)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise BadProfile(
            f"{path}: no recording of this version ({type(error).__name__}: {error}; expected {_SCHEMA})"
        ) from error


def _profile(path: str, document: dict, plan: dict) -> Profile:
    on_host = document["device"] == "CPU"
    work, blocked, instructions, memory = [], [], {}, {}
    for step in document["steps"]:
        rows = step["instructions"]
        planned = [document["triggers"][row[0]][3][row[1]] for row in rows]
        times = _shares(rows, planned)
        work += [
            _work(instruction, row, time, plan, document["groups"])
            for row, instruction, time in zip(rows, planned, times)
            if row[4] >= 0
        ]
        blocked += _blocked(rows, planned, on_host)
        instructions[step["begin_ns"]] = _instruction_rows(step, planned, times, document, plan)
        memory[step["begin_ns"]] = _memory(document, plan, step)
    notes = [cost_text(document)]
    if document["abandoned"]:
        notes.append(f"{document['abandoned']} recorded steps left the plan or were given up, and are not in it")
    measured = {"unrecorded_steps_ns": document["unrecorded_steps_ns"]}
    if (cost := cost_ns(document)) is not None:
        measured["recording_ns"] = max(0, cost)
    return Profile(
        path=path,
        rank=document["rank"],
        world_size=document["world_size"],
        device=document["device"],
        device_bytes=document["device_bytes"],
        steps=[(step["begin_ns"], step["end_ns"]) for step in document["steps"]],
        steps_on_device={
            step["begin_ns"]: (step["device_begin_ns"], step["device_end_ns"]) for step in document["steps"]
        },
        work=sorted(work, key=lambda one: (one.begin_ns, one.stream)),
        ranges=[],
        blocked=sorted(blocked),
        memory=[],
        instructions=instructions,
        memory_of_step=memory,
        measured=measured,
        notes=notes,
    )


def collectives_of(profile: Profile) -> list[tuple]:
    """The profile's collectives, as other ranks have to know them."""
    return [
        (
            one.begin_ns, one.end_ns, one.launched_ns, one.collective.kind, one.collective.group,
            one.collective.full_tensor_bytes,
        )
        for one in profile.work
        if one.collective is not None
    ]


def of_other_rank(rank: int, world_size: int, collectives: list[tuple]) -> Profile:
    work = [
        Work(begin, end, 0, kind, launched, collective=Collective(kind, group, bytes_))
        for begin, end, launched, kind, group, bytes_ in collectives
    ]
    return Profile(f"rank {rank}", rank, world_size, "", 0, [], work, [], [], [])
