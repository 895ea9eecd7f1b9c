"""The measured report: the median of the profiled steps of one rank, in the words of the simulated report of the plan."""

from __future__ import annotations

import collections
import dataclasses

from . import ranks, spans
from .kineto import GLOO, HOST, Profile, Work
from .parts import Part, Parts
from .snapshot import Memory

_PASSES = ("forward", "backward", "optimizer")
_PPM = 1_000_000


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
    begin_ns: int
    end_ns: int
    work: list[Placed]  # launched in it, by begin

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns

    @property
    def compute(self) -> spans.Intervals:
        return spans.union(placed.interval for placed in self.work if placed.computes)

    @property
    def collectives(self) -> list[Placed]:
        return [placed for placed in self.work if placed.work.collective is not None]


def steps_of(profile: Profile, parts: Parts) -> list[Step]:
    launched = sorted(profile.work, key=lambda work: work.launched_ns)
    steps = []
    for begin, end in profile.steps:
        own = [Placed(work, parts.of(work)) for work in launched if begin <= work.launched_ns < end]
        steps.append(Step(begin, end, sorted(own, key=lambda placed: placed.interval)))
    return steps


def median_step(steps: list[Step]) -> Step:
    """The step that takes the median time; of an even number the faster one of the middle. One step stands for all, so that its parts add up."""
    return sorted(steps, key=lambda step: (step.duration_ns, step.begin_ns))[(len(steps) - 1) // 2]


def communicator_of(kind: str, group: tuple[int, ...], simulated: dict, plan: dict) -> str:
    """The plan's name for it. Where the profile does not say the group, the plan's only one for that kind."""
    names = [entry["communicator"] for entry in simulated["collectives"] if entry["kind"] == kind]
    sizes = {one.get("name", ""): one.get("size", 1) for one in plan.get("communicators", [])}
    fitting = [name for name in names if not group or sizes.get(name) == len(group)]
    return fitting[0] if fitting else f"of {len(group)} ranks" if group else "unknown"


def _passes(step: Step) -> dict[str, int]:
    """Up to the end of a pass's last kernel of those launched before the next pass."""
    launched = {name: [placed.work for placed in step.work if placed.part.phase == name] for name in _PASSES}
    at, found = step.begin_ns, {}
    for name, following in zip(_PASSES, ("backward", "optimizer", None)):
        until = min((work.launched_ns for work in launched.get(following, [])), default=step.end_ns)
        end = max([at, *(work.end_ns for work in launched[name] if work.launched_ns < until)])
        found[name] = end - at
        at = end
    return found


def _streams(step: Step) -> list[dict]:
    by_stream = collections.defaultdict(list)
    for placed in step.work:
        by_stream[placed.work.stream].append(placed)
    roles: dict[str, list[Placed]] = collections.defaultdict(list)
    for stream, own in sorted(by_stream.items()):
        kinds = collections.Counter(placed.work.collective.kind for placed in own if placed.work.collective)
        if own[0].work.stream_name:
            role = own[0].work.stream_name
        elif kinds and stream != GLOO:
            role = kinds.most_common(1)[0][0]
        elif stream == GLOO:
            for placed in own:
                roles[placed.work.collective.kind].append(placed)
            continue
        elif stream == HOST or any(placed.computes for placed in own):
            role = "compute"
        else:
            role = "all_gather_copy_in"
        roles[role].extend(own)
    return [{"stream": role, "busy_ns": spans.length(spans.union(placed.interval for placed in own)), "operations": len(own)} for role, own in roles.items()]


def _exposed(placed: list[Placed], compute: spans.Intervals) -> int:
    return spans.length(spans.minus(spans.union(one.interval for one in placed), compute))


def _collectives(step: Step, compute: spans.Intervals, simulated: dict, plan: dict) -> list[dict]:
    groups = collections.defaultdict(list)
    for placed in step.collectives:
        collective = placed.work.collective
        groups[collective.kind, communicator_of(collective.kind, collective.group, simulated, plan)].append(placed)
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
    return [{"kind": kind, "phase": phase, "count": count, "busy_ns": busy} for (kind, phase), (count, busy) in sorted(sums.items())]


def _beside(collectives: list[dict], simulated: dict) -> tuple[int, int, list[str]]:
    """Collectives that only the profile has, that only the plan has, and what to say of bytes."""
    planned = {(entry["kind"], entry["communicator"]): (entry["count"], entry["full_tensor_bytes"]) for entry in simulated["collectives"]}
    found = {(entry["kind"], entry["communicator"]): (entry["count"], entry["full_tensor_bytes"]) for entry in collectives}
    beside = missing = 0
    notes = []
    for key in sorted(planned.keys() | found.keys()):
        (count, bytes_), (expected, expected_bytes) = found.get(key, (0, 0)), planned.get(key, (0, 0))
        beside += max(0, count - expected)
        missing += max(0, expected - count)
        if count == expected and bytes_ not in (0, expected_bytes):
            beside, missing = beside + count, missing + count
        if (count, bytes_) != (expected, expected_bytes) and not (count == expected and bytes_ == 0):
            notes.append(f"{key[0]} on {key[1]}: {count} of {bytes_} bytes in a step, the plan has {expected} of {expected_bytes}")
    return beside, missing, notes


def _memory(memory: Memory | None, simulated: dict, device_bytes: int) -> dict:
    if memory is None:
        zeros = dict.fromkeys(("peak_bytes", "steady_bytes", "context_bytes", "reserved_bytes", "cache_releases"), 0)
        return {**zeros, "peak_at": "", "peak_by_category": [], "device_memory_bytes": device_bytes, "fits": True}
    return {
        "peak_bytes": memory.peak_bytes,
        "peak_at": memory.peak_at,
        "peak_by_category": [{"category": name, "size_bytes": bytes_} for name, bytes_ in memory.by_category or (("allocated", memory.peak_bytes),)],
        "steady_bytes": memory.steady_bytes,
        "context_bytes": 0,
        "device_memory_bytes": device_bytes,
        "reserved_bytes": memory.reserved_bytes,
        "cache_releases": memory.cache_releases,
        "fits": not memory.out_of_memory,
    }


def report_of(profile: Profile, others: list[Profile], plan: dict, simulated: dict, memory: Memory | None) -> dict:
    """others: of the job's other ranks."""
    parts = Parts(profile, [entry["unit"] for entry in simulated["units"]])
    steps = steps_of(profile, parts)
    step = median_step(steps)
    waiting_ns, clocks = ranks.waiting(profile, others, (step.begin_ns, step.end_ns))
    compute = step.compute
    exchanging = spans.union(placed.interval for placed in step.collectives)
    communication, exposed = spans.length(exchanging), spans.length(spans.minus(exchanging, compute))
    passes = _passes(step)
    blocked = spans.length(spans.union((max(begin, step.begin_ns), min(end, step.end_ns)) for begin, end in profile.blocked if begin < step.end_ns and end > step.begin_ns))
    collectives = _collectives(step, compute, simulated, plan)
    beside, missing, notes = _beside(collectives, simulated)
    known = {entry["unit"] for entry in simulated["units"]}
    lost = [placed for placed in step.work if placed.part.phase in ("forward", "backward") and placed.part.unit not in known]
    tokens = plan.get("tokens_per_step", 0)
    memory = memory or profile.memory_of_step.get(step.begin_ns)
    if not parts.names_units:
        notes.append("the profile has no ranges of FSDP1, FSDP2 or a plan that say which unit work belongs to")
    notes.append(f"of {len(steps)} steps that were profiled the one of median time stands for all; work is in the step that launched it")
    if memory is None:
        notes.append("memory was not recorded: no snapshot was given, and the profiler did not follow memory")
    return {
        "schema": "shardplan.report/1",
        "model": simulated["model"],
        "policy": simulated["policy"],
        "cluster": simulated["cluster"],
        **({"plan_digest": simulated["plan_digest"]} if simulated.get("plan_digest") else {}),
        "world_size": profile.world_size,
        "step_ns": step.duration_ns,
        **{f"{name}_ns": passes[name] for name in _PASSES},
        "compute_ns": spans.length(compute),
        "communication_ns": communication,
        "exposed_communication_ns": exposed,
        "overlap_ppm": _PPM - exposed * _PPM // communication if communication else _PPM,
        "host_ns": step.duration_ns - blocked,
        "tokens_per_second_per_rank": tokens * 1_000_000_000 // step.duration_ns if step.duration_ns else 0,
        "model_flops_utilization_ppm": simulated["model_flops_utilization_ppm"] * simulated["step_ns"] // step.duration_ns if step.duration_ns else 0,
        "streams": _streams(step),
        "collectives": collectives,
        "units": _units(step, compute, simulated),
        "memory": _memory(memory, simulated, profile.device_bytes),
        "operators": _operators(step),
        **({"instructions": profile.instructions[step.begin_ns]} if profile.instructions else {}),
        "measured": {
            "device": profile.device,
            "rank": profile.rank,
            "ranks": 1 + len(others),
            "steps_ns": [one.duration_ns for one in steps],
            "waiting_ns": waiting_ns,
            "unassigned_kernels": len(lost),
            "unassigned_ns": sum(placed.work.duration_ns for placed in lost),
            "collectives_beside_plan": beside,
            "collectives_missing": missing,
            **profile.measured,
        },
        "notes": notes + profile.notes + clocks,
    }
