# SPDX-License-Identifier: Apache-2.0
"""The measured report: the median of the profiled steps of one rank, in the words of the simulated report of the
plan."""

from __future__ import annotations

import collections
import dataclasses

from . import beside, communicators, ranks, spans
from .kineto import GLOO, HOST, Profile, Work
from .parts import Part, Parts
from .snapshot import Memory

_PASSES = ("forward", "backward", "optimizer")
_PPM = 1_000_000
# In the words and the order of the simulator's DeviceActivity; collectives not named here are their kind.
_ACTIVITIES = (
    "forward", "backward", "optimizer", "copies", "all_gather", "reduce_scatter", "all_reduce", "all_to_all",
    "send_recv", "other_collective",
)
_ACTIVITY_OF = {"send": "send_recv", "recv": "send_recv"}
_ACTIVITY_OF |= dict.fromkeys(("broadcast", "reduce", "gather", "scatter"), "other_collective")
_PICTURE_COLUMNS = 2000


@dataclasses.dataclass(frozen=True)
class Placed:
    work: Work
    part: Part

    @property
    def interval(self) -> tuple[int, int]:
        return self.work.begin_ns, self.work.end_ns

    @property
    def computes(self) -> bool:
        """The model, the loss or the optimizer, not FSDP's own copies and collectives."""
        return self.part.phase in _PASSES


@dataclasses.dataclass(frozen=True)
class Step:
    """begin_ns, end_ns: of the host, which may be far ahead of the device."""

    begin_ns: int
    end_ns: int
    device_begin_ns: int
    device_end_ns: int
    work: list[Placed]  # launched in it, by begin
    running: list[Placed]  # at some moment of the device's

    @property
    def duration_ns(self) -> int:
        return self.device_end_ns - self.device_begin_ns

    @property
    def compute(self) -> spans.Intervals:
        return spans.union(placed.interval for placed in self.work if placed.computes)

    @property
    def collectives(self) -> list[Placed]:
        return [placed for placed in self.work if placed.work.collective is not None]


def steps_of(profile: Profile, parts: Parts) -> list[Step]:
    placed = sorted((Placed(work, parts.of(work)) for work in profile.work), key=lambda one: one.interval)
    steps = []
    for begin, end in profile.steps:
        own = [one for one in placed if begin <= one.work.launched_ns < end]
        if begin in profile.steps_on_device:
            begins, ends = profile.steps_on_device[begin]
        else:
            behind = _behind_ns(own)
            begins, ends = begin + behind, end + behind
        steps.append(
            Step(
                begin,
                end,
                begins,
                ends,
                own,
                [one for one in placed if one.work.begin_ns < ends and one.work.end_ns > begins],
            )
        )
    return steps


def _behind_ns(own: list[Placed]) -> int:
    """How long what a step launches first waits for the steps before it."""
    first = min((one.work for one in own), key=lambda work: work.launched_ns, default=None)
    return max(0, first.begin_ns - first.launched_ns) if first is not None else 0


def median_step(steps: list[Step]) -> Step:
    """The step that takes the median time; of an even number the faster one of the middle. One step stands for all, so
    that its parts add up."""
    return sorted(steps, key=lambda step: (step.duration_ns, step.begin_ns))[(len(steps) - 1) // 2]


def _passes(step: Step) -> dict[str, int]:
    """Up to the end of a pass's last kernel of those launched before the next pass."""
    launched = {name: [placed.work for placed in step.work if placed.part.phase == name] for name in _PASSES}
    at, found = step.device_begin_ns, {}
    for name, following in zip(_PASSES, ("backward", "optimizer", None)):
        until = min((work.launched_ns for work in launched.get(following, [])), default=step.end_ns)
        end = max([at, *(work.end_ns for work in launched[name] if work.launched_ns < until)])
        found[name] = end - at
        at = end
    return found


def _roles(work: list[Placed]) -> dict[tuple[int, str], str]:
    """The plan's name for each stream. Gloo's threads are one stream for each kind of FSDP's collectives, and one for
    each communicator of the model's, as the plan's streams are. NCCL runs a collective that is waited for at once in
    the stream of the model's kernels."""
    by_stream = collections.defaultdict(list)
    for placed in work:
        by_stream[_stream(placed)].append(placed)
    roles = {}
    for stream, own in sorted(by_stream.items()):
        exchanges = collections.Counter(_exchange(placed) for placed in own if placed.work.collective)
        computes = sum(placed.computes for placed in own)
        if own[0].work.stream_name:
            roles[stream] = own[0].work.stream_name
        elif exchanges and computes <= exchanges.total():
            roles[stream] = exchanges.most_common(1)[0][0]
        elif stream[0] == HOST or computes:
            roles[stream] = "compute"
        else:
            roles[stream] = "all_gather_copy_in"
    return roles


def _exchange(placed: Placed) -> str:
    """The plan's stream that has such collectives (EngineStreams)."""
    one = placed.work.collective
    return f"model {one.communicator}" if one.of_model else one.kind


def _stream(placed: Placed) -> tuple[int, str]:
    return placed.work.stream, _exchange(placed) if placed.work.stream == GLOO else ""


def _streams(step: Step) -> list[dict]:
    roles = _roles(step.work)
    by_role: dict[str, list[Placed]] = {role: [] for role in roles.values()}
    for placed in step.work:
        by_role[roles[_stream(placed)]].append(placed)
    return [
        {
            "stream": role,
            "busy_ns": spans.length(spans.union(placed.interval for placed in own)),
            "operations": len(own),
        }
        for role, own in by_role.items()
    ]


def _activity(placed: Placed) -> str:
    """In the words of the simulator's DeviceActivity."""
    if placed.work.collective is not None:
        return _ACTIVITY_OF.get(placed.work.collective.kind, placed.work.collective.kind)
    return placed.part.phase if placed.computes else "copies"


def _activities(step: Step) -> list[dict]:
    """The device's activity at each moment: the first in the list, if it does several things. The times add up to the
    step."""
    by_activity = collections.defaultdict(list)
    for placed in step.running:
        by_activity[_activity(placed)].append(
            (max(placed.work.begin_ns, step.device_begin_ns), min(placed.work.end_ns, step.device_end_ns))
        )
    named = [*_ACTIVITIES, *sorted(by_activity.keys() - set(_ACTIVITIES))]
    busy: spans.Intervals = []
    times = {}
    for name in named:
        more = spans.union([*busy, *by_activity[name]])
        times[name] = spans.length(more) - spans.length(busy)
        busy = more
    times["idle"] = step.duration_ns - spans.length(busy)
    return [{"activity": name, "time_ns": time} for name, time in times.items() if time > 0]


def _timeline(step: Step) -> list[dict]:
    """Work of a stream, of one unit and activity, with no gap between that could be seen."""
    seen_ns = step.duration_ns // _PICTURE_COLUMNS
    roles = _roles(step.running)
    several = collections.Counter(roles.values())
    last: dict[tuple[int, str], dict] = {}
    timeline = []
    for placed in step.running:
        stream, activity = _stream(placed), _activity(placed)
        begin, end = (
            max(placed.work.begin_ns - step.device_begin_ns, 0),
            min(placed.work.end_ns - step.device_begin_ns, step.duration_ns),
        )
        name = f"{activity} {placed.part.unit}".strip()
        before = last.get(stream)
        if (
            before is not None
            and before["name"] == name
            and placed.work.collective is None
            and begin - before["begin_ns"] - before["duration_ns"] <= seen_ns
        ):
            before["duration_ns"] = max(before["duration_ns"], end - before["begin_ns"])
            continue
        role = roles[stream] if several[roles[stream]] == 1 else f"{roles[stream]} (stream {stream[0]})"
        last[stream] = {
            "stream": role, "activity": activity, "name": name, "begin_ns": begin, "duration_ns": end - begin,
        }
        timeline.append(last[stream])
    return sorted(timeline, key=lambda span: (span["stream"], span["begin_ns"]))


def _exposed(placed: list[Placed], compute: spans.Intervals) -> int:
    return spans.length(spans.minus(spans.union(one.interval for one in placed), compute))


def _collectives(step: Step, compute: spans.Intervals) -> list[dict]:
    groups = collections.defaultdict(list)
    for placed in step.collectives:
        groups[placed.work.collective.kind, placed.work.collective.communicator].append(placed)
    return [
        {
            "kind": kind,
            "communicator": communicator,
            "count": len(own),
            "full_tensor_bytes": sum(one.work.collective.full_tensor_bytes for one in own),
            "busy_ns": sum(one.work.duration_ns for one in own),
            "exposed_ns": _exposed(own, compute),
            "cost_source": "measured",
        }
        for (kind, communicator), own in sorted(groups.items())
    ]


def _units(step: Step, compute: spans.Intervals, simulated: dict) -> list[dict]:
    busy: collections.Counter = collections.Counter()
    exchanged = collections.defaultdict(list)
    for placed in step.work:
        busy[placed.part.unit, placed.part.phase] += placed.work.duration_ns
        if placed.work.collective is not None:
            exchanged[placed.part.unit].append(placed)
    return [
        {
            "unit": entry["unit"],
            "param_bytes": entry["param_bytes"],
            "forward_ns": busy[entry["unit"], "forward"],
            "backward_ns": busy[entry["unit"], "backward"],
            "exposed_ns": _exposed(exchanged[entry["unit"]], compute),
        }
        for entry in simulated["units"]
    ]


def _operators(step: Step) -> list[dict]:
    sums: dict[tuple[str, str], list[int]] = collections.defaultdict(lambda: [0, 0])
    for placed in step.work:
        if placed.computes:
            entry = sums[placed.part.kind, placed.part.phase]
            entry[0] += 1
            entry[1] += placed.work.duration_ns
    return [
        {"kind": kind, "phase": phase, "count": count, "busy_ns": busy}
        for (kind, phase), (count, busy) in sorted(sums.items())
    ]


def _memory(memory: Memory | None, simulated: dict, device_bytes: int) -> dict:
    if memory is None:
        zeros = dict.fromkeys(("peak_bytes", "steady_bytes", "context_bytes", "reserved_bytes", "cache_releases"), 0)
        return {**zeros, "peak_at": "", "peak_by_category": [], "device_memory_bytes": device_bytes, "fits": True}
    return {
        "peak_bytes": memory.peak_bytes,
        "peak_at": memory.peak_at,
        "peak_by_category": [
            {"category": name, "size_bytes": bytes_}
            for name, bytes_ in memory.by_category or (("allocated", memory.peak_bytes),)
        ],
        "steady_bytes": memory.steady_bytes,
        "context_bytes": 0,
        "device_memory_bytes": device_bytes,
        "reserved_bytes": memory.reserved_bytes,
        "cache_releases": memory.cache_releases,
        "fits": not memory.out_of_memory,
    }


def report_of(profile: Profile, others: list[Profile], plan: dict, simulated: dict, memory: Memory | None) -> dict:
    """others: of the job's other ranks."""
    of_models = communicators.assign(profile, plan, simulated).of_models()
    for other in others:
        communicators.assign(other, plan, simulated)
    parts = Parts(profile, [entry["unit"] for entry in simulated["units"]])
    steps = steps_of(profile, parts)
    step = median_step(steps)
    waiting_ns, clocks = ranks.waiting(profile, others, (step.begin_ns, step.end_ns))
    compute = step.compute
    exchanging = spans.union(placed.interval for placed in step.collectives)
    communication, exposed = spans.length(exchanging), spans.length(spans.minus(exchanging, compute))
    passes = _passes(step)
    blocked = spans.length(
        spans.union(
            (max(begin, step.begin_ns), min(end, step.end_ns))
            for begin, end in profile.blocked
            if begin < step.end_ns and end > step.begin_ns
        )
    )
    collectives = _collectives(step, compute)
    # A recording of the plan's own has segments as wholes.
    hidden = of_models if profile.instructions else {}
    more, missing, notes = beside.counted(collectives, beside.planned(simulated, hidden))
    if hidden:
        notes.append(f"{sum(count for count, _ in hidden.values())} collectives of the model are inside its segments")
    known = {entry["unit"] for entry in simulated["units"]}
    lost = [
        placed for placed in step.work if placed.part.phase in ("forward", "backward") and placed.part.unit not in known
    ]
    tokens = plan.get("tokens_per_step", 0) // plan.get("ranks_per_batch", 1)
    memory = memory or profile.memory_of_step.get(step.begin_ns)
    if not parts.names_units:
        notes.append("the profile has no ranges of FSDP1, FSDP2 or a plan that say which unit work belongs to")
    notes.append(
        f"of {len(steps)} steps that were profiled the one of median time stands for all; work is in the step that "
        "launched it"
    )
    if memory is None:
        notes.append("memory was not recorded: no snapshot was given, and the profiler did not follow memory")
    return {
        "schema": "shardplan.report/1",
        "model": simulated["model"],
        "policy": simulated["policy"],
        "cluster": profile.device,
        **({"plan_digest": simulated["plan_digest"]} if simulated.get("plan_digest") else {}),
        "world_size": profile.world_size,
        "step_ns": step.duration_ns,
        **{f"{name}_ns": passes[name] for name in _PASSES},
        "compute_ns": spans.length(compute),
        "communication_ns": communication,
        "exposed_communication_ns": exposed,
        "overlap_ppm": _PPM - exposed * _PPM // communication if communication else _PPM,
        "host_ns": step.end_ns - step.begin_ns - blocked,
        "tokens_per_second_per_rank": tokens * 1_000_000_000 // step.duration_ns if step.duration_ns else 0,
        "model_flops_utilization_ppm": simulated["model_flops_utilization_ppm"]
        * simulated["step_ns"]
        // step.duration_ns
        if step.duration_ns
        else 0,
        "streams": _streams(step),
        "collectives": collectives,
        "units": _units(step, compute, simulated),
        "memory": _memory(memory, simulated, profile.device_bytes),
        "activities": _activities(step),
        "operators": _operators(step),
        "timeline": _timeline(step),
        **({"instructions": profile.instructions[step.begin_ns]} if profile.instructions else {}),
        "measured": {
            "device": profile.device,
            "rank": profile.rank,
            "ranks": 1 + len(others),
            "steps_ns": [one.duration_ns for one in steps],
            "waiting_ns": waiting_ns,
            "unassigned_kernels": len(lost),
            "unassigned_ns": sum(placed.work.duration_ns for placed in lost),
            "collectives_beside_plan": more,
            "collectives_missing": missing,
            **profile.measured,
        },
        "notes": notes + profile.notes + clocks,
    }
