# SPDX-License-Identifier: Apache-2.0
"""Kineto traces as torch.profiler writes them: what ran on the device, and which operator and ranges of the host it
comes from.

Times are integers in nanoseconds of the trace's own clock. Work on a device is a kernel, a copy or a memset, with the
launch that the trace correlates it with. Work on a CPU is an outermost operator, or a collective of Gloo's threads.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator

from shardplan import files

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}
_BLOCKS = re.compile(r"cuda(Stream|Event|Device)Synchronize")
_STEP = re.compile(r"ProfilerStep#\d+$")
_GLOO = re.compile(r"gloo:\w+$")
_ENGINE = "autograd::engine"
HOST, GLOO = -1, -2  # in place of a stream: the host itself, threads of Gloo

# Names of collectives in a profile -> the plan's. Gloo's reduce_scatter is an all_reduce of its threads: the recorded
# call says what was meant.
COLLECTIVES = {
    "_allgather_base": "all_gather",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "_all_gather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
}
_ELEMENT_BYTES = {
    "Double": 8, "Long": 8, "Float": 4, "Int": 4, "BFloat16": 2, "Half": 2, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip


class BadProfile(Exception):
    """A file is no profile, or not one of a training: its name, where, what was found and expected."""


@dataclasses.dataclass(frozen=True)
class Collective:
    kind: str  # the plan's name; what the profile calls it where a plan has none
    group: tuple[int, ...]  # ranks
    full_tensor_bytes: int


@dataclasses.dataclass
class Work:
    """One piece of work that ran. operators, ranges: the host's, where it was launched, the innermost last."""

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


@dataclasses.dataclass(frozen=True)
class Range:
    """A record_function range of the host."""

    begin_ns: int
    end_ns: int
    thread: int
    name: str


@dataclasses.dataclass
class Profile:
    path: str
    rank: int
    world_size: int
    device: str
    device_bytes: int
    steps: list[tuple[int, int]]  # of the host
    work: list[Work]  # by begin
    ranges: list[Range]  # by begin
    blocked: list[tuple[int, int]]  # the host waits for the device
    memory: list[tuple[int, int, int]]  # (time, allocated, reserved), where the profiler recorded it
    # From a recording by the plan's own runtime (recorded.py), by begin of the step: rows of the report;
    # snapshot.Memory.
    steps_on_device: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    instructions: dict[int, list[dict]] = dataclasses.field(default_factory=dict)
    memory_of_step: dict[int, object] = dataclasses.field(default_factory=dict)
    measured: dict = dataclasses.field(default_factory=dict)  # more of the report's `measured`
    notes: list[str] = dataclasses.field(default_factory=list)


def _ns(value: object) -> int:
    return round(float(value) * 1000)


def data_of(path: str) -> bytes:
    """Raises BadProfile."""
    try:
        return files.read_bytes(path)
    except OSError as error:
        raise BadProfile(f"{path}: cannot be read: {error.strerror or error}") from error


def _events(path: str, data: bytes) -> tuple[dict, list[dict]]:
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (EOFError, OSError, zlib.error) as error:
        raise BadProfile(
            f"{path}: the compressed data are not whole ({error}): was the job killed while it wrote them?"
        ) from error
    try:
        document = json.loads(data)
    except UnicodeDecodeError as error:
        raise BadProfile(
            f"{path}: no text (found byte {data[error.start]:#04x} at {error.start}, expected a trace of "
            "torch.profiler in JSON)"
        ) from error
    except json.JSONDecodeError as error:
        raise BadProfile(
            f"{path}:{error.lineno}:{error.colno}: {error.msg} (expected a trace of torch.profiler; is the file whole?)"
        ) from error
    except RecursionError:
        raise BadProfile(f"{path}: values are nested too deep (expected a trace of torch.profiler)") from None
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        raise BadProfile(
            f"{path}: no traceEvents (expected a trace of torch.profiler: export_chrome_trace, "
            "tensorboard_trace_handler)"
        )
    return document, [event for event in events if isinstance(event, dict) and isinstance(event.get("name"), str)]


def _complete(events: list[dict]) -> Iterator[dict]:
    for event in events:
        if event.get("ph") == "X" and "dur" in event:
            event["begin"] = _ns(event["ts"])
            event["end"] = event["begin"] + _ns(event["dur"])
            event.setdefault("args", {})
            yield event


_KERNELS = {"AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "AllReduce": "all_reduce"}
_KERNEL = re.compile(r"nccl\w*?_(\w+?)(_|\()")


def _collective(kernel: str, arguments: dict) -> Collective | None:
    """c10d tells the profiler what it calls NCCL for; a plan calls NCCL itself, and its kernels have a name alone."""
    if not kernel.startswith("nccl"):
        return None
    name = arguments.get("Collective name")
    if not isinstance(name, str):
        match = _KERNEL.match(kernel)
        return Collective(_KERNELS.get(match.group(1), match.group(1)) if match else kernel, (), 0)
    kind = COLLECTIVES.get(name, name)
    numel = arguments.get("Out msg nelems" if kind == "all_gather" else "In msg nelems", 0)
    try:
        group = tuple(json.loads(arguments.get("Process Group Ranks") or "[]"))
    except (TypeError, ValueError):
        group = ()  # "[0, 1, ...]" of a large group
    return Collective(kind, group, int(numel) * _ELEMENT_BYTES.get(str(arguments.get("dtype")), 0))


class _Host:
    """Who encloses a moment of a thread: operators and ranges, the outermost first."""

    def __init__(self, spans: list[dict]) -> None:
        self._by_thread: dict[object, tuple[list[int], list[tuple[dict, ...]]]] = {}
        by_thread = collections.defaultdict(list)
        for span in spans:
            by_thread[span["pid"], span["tid"]].append(span)
        for thread, own in by_thread.items():
            own.sort(key=lambda span: (span["begin"], -span["end"]))
            self._by_thread[thread] = self._changes(own)

    @staticmethod
    def _changes(spans: list[dict]) -> tuple[list[int], list[tuple[dict, ...]]]:
        times, stacks, stack = [], [], []

        def close(until: int) -> None:
            while stack and stack[-1]["end"] <= until:
                times.append(stack.pop()["end"])
                stacks.append(tuple(stack))

        for span in spans:
            close(span["begin"])
            stack.append(span)
            times.append(span["begin"])
            stacks.append(tuple(stack))
        close(1 << 62)
        return times, stacks

    def around(self, thread: tuple, moment: int) -> tuple[dict, ...]:
        times, stacks = self._by_thread.get(thread, ([], []))
        position = bisect.bisect_right(times, moment) - 1
        return stacks[position] if position >= 0 else ()


def _named(stack: tuple[dict, ...], category: str) -> tuple[str, ...]:
    return tuple(span["name"] for span in stack if span["cat"] == category)


def _on_device(spans: list[dict], host: _Host) -> list[Work]:
    launches = {
        span["args"]["correlation"]: span
        for span in spans
        if span.get("cat") in _LAUNCHES and "correlation" in span["args"]
    }
    work = []
    for span in spans:
        if span.get("cat") not in _DEVICE:
            continue
        arguments = span["args"]
        launch = launches.get(arguments.get("correlation"))
        stack = host.around((launch["pid"], launch["tid"]), launch["begin"]) if launch else ()
        launched = launch["begin"] if launch else span["begin"]
        collective = _collective(span["name"], arguments)
        work.append(
            Work(
                span["begin"], span["end"], int(arguments.get("stream", 0)), span["name"], launched,
                _named(stack, "cpu_op"), _named(stack, "user_annotation"), collective,
            )
        )
    return work


def _called(span: dict) -> Collective | None:
    """A collective's call on the CPU, by the shapes of its inputs where they were recorded; all ranks stand for its
    group."""
    name = span["name"].removeprefix("c10d::").strip("_")
    kind = COLLECTIVES.get(name) or COLLECTIVES.get("_" + name)
    if not span["name"].startswith("c10d::") or kind is None:
        return None
    shapes, dtypes = span["args"].get("Input Dims") or [], span["args"].get("Input type") or []
    full = 1 if kind == "reduce_scatter" else 0
    bytes_ = 0
    if len(shapes) > full and len(dtypes) > full and all(isinstance(length, int) for length in shapes[full]):
        dtype = str(dtypes[full]).removeprefix("c10::")
        bytes_ = math.prod(shapes[full]) * _ELEMENT_BYTES.get(dtype[:1].upper() + dtype[1:], 0)
    return Collective(kind, (), bytes_)


def _is_operator(name: str) -> bool:
    return "::" in name and not name.startswith(_ENGINE)


def _on_host(spans: list[dict], host: _Host) -> list[Work]:
    """Outermost operators are the work, below the nodes of autograd, which have no namespace; collectives run in
    threads of Gloo's, and begin in the order in which they were called."""
    calls: collections.deque = collections.deque()
    work = []
    for span in sorted(
        (span for span in spans if span.get("cat") == "cpu_op" and _is_operator(span["name"])),
        key=lambda span: span["begin"],
    ):
        stack = host.around((span["pid"], span["tid"]), span["begin"])
        operators, ranges = _named(stack, "cpu_op"), _named(stack, "user_annotation")
        if (collective := _called(span)) is not None:
            calls.append((span["begin"], ranges, collective))
        elif sum(_is_operator(name) for name in operators) == 1:
            work.append(Work(span["begin"], span["end"], HOST, span["name"], span["begin"], operators, ranges))
    for span in sorted(
        (span for span in spans if span.get("cat") == "user_annotation" and _GLOO.match(span["name"])),
        key=lambda span: span["begin"],
    ):
        if calls and calls[0][0] <= span["begin"]:
            called, ranges, collective = calls.popleft()
            work.append(Work(span["begin"], span["end"], GLOO, span["name"], called, (), ranges, collective))
    return work


def profile_of(path: str, data: bytes) -> Profile:
    """Raises BadProfile."""
    document, events = _events(path, data)
    try:
        spans = list(_complete(events))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadProfile(
            f"{path}: an event without a time ({type(error).__name__}: {error}; expected numbers ts and dur)"
        ) from error
    info = document.get("distributedInfo") or {}
    devices = document.get("deviceProperties") or []
    host = _Host([span for span in spans if span.get("cat") in ("cpu_op", "user_annotation")])
    on_device = _on_device(spans, host)
    work = on_device or _on_host(spans, host)
    if not work:
        raise BadProfile(
            f"{path}: nothing ran (found {len(spans)} spans, none of a kernel or an operator): was the profiler "
            "active in a step?"
        )
    annotations = [span for span in spans if span.get("cat") == "user_annotation"]
    memory = [
        (_ns(event["ts"]), int(event["args"]["Total Allocated"]), int(event["args"]["Total Reserved"]))
        for event in events
        if event["name"] == "[memory]"
        and {"Total Allocated", "Total Reserved"} <= event.get("args", {}).keys()
        and event["args"].get("Device Type") == 1
    ]
    profile = Profile(
        path=path,
        rank=int(info.get("rank", 0)),
        world_size=int(info.get("world_size", 1)),
        device=(str(devices[0].get("name", "")) if devices else "") or ("GPU" if on_device else "CPU"),
        device_bytes=int(devices[0].get("totalGlobalMem", 0)) if devices else 0,
        steps=sorted((span["begin"], span["end"]) for span in annotations if _STEP.match(span["name"])),
        work=sorted(work, key=lambda one: (one.begin_ns, one.stream)),
        ranges=sorted(
            (Range(span["begin"], span["end"], span["tid"], span["name"]) for span in annotations),
            key=lambda one: (one.begin_ns, -one.end_ns),
        ),
        blocked=sorted(
            (span["begin"], span["end"])
            for span in spans
            if span.get("cat") in _LAUNCHES and _BLOCKS.search(span["name"])
        ),
        memory=sorted(memory),
    )
    if not profile.steps:
        raise BadProfile(
            f"{path}: no steps (expected ranges ProfilerStep#N: call step() of the profiler after each step of the "
            "loop)"
        )
    return profile
