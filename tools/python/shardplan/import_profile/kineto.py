# SPDX-License-Identifier: Apache-2.0
"""Kineto traces as torch.profiler writes them: what ran on the device, and which operator and ranges of the host it
comes from.

Times are integers in nanoseconds of the trace's own clock. Work on a device is a kernel, a copy or a memset, with the
launch that the trace correlates it with. Work on a CPU is in on_host.py.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import gzip
import json
import re
import zlib
from collections.abc import Iterator

from shardplan import files

from . import collectives, on_host
from .work import GLOO, HOST, Collective, Work  # noqa: F401 - a profile is made of them

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}
_BLOCKS = re.compile(r"cuda(Stream|Event|Device)Synchronize")
_STEP = re.compile(r"ProfilerStep#\d+$")


class BadProfile(Exception):
    """A file is no profile, or not one of a training: its name, where, what was found and expected."""


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


def _around(host: _Host, span: dict) -> tuple[tuple[str, ...], tuple[str, ...]]:
    stack = host.around((span["pid"], span["tid"]), span["begin"])
    return _named(stack, "cpu_op"), _named(stack, "user_annotation")


def _on_device(spans: list[dict], host: _Host) -> list[Work]:
    transfers = collectives.Transfers(spans)
    launches = {
        span["args"]["correlation"]: span
        for span in spans
        if span.get("cat") in _LAUNCHES and "correlation" in span["args"]
    }
    launched = [
        (launches.get(span["args"].get("correlation"), span), span) for span in spans if span.get("cat") in _DEVICE
    ]
    work = []
    for launch, span in sorted(launched, key=lambda pair: pair[0]["begin"]):
        thread, begin = (launch["pid"], launch["tid"]), launch["begin"]
        stack = host.around(thread, begin) if launch is not span else ()
        collective = collectives.of_kernel(
            span["name"], span["args"], stack, functools.partial(transfers.until, thread, begin)
        )
        work.append(
            Work(
                span["begin"], span["end"], int(span["args"].get("stream", 0)), span["name"], begin,
                _named(stack, "cpu_op"), _named(stack, "user_annotation"), collective,
            )
        )
    return work


def _device(document: dict, spans: list[dict]) -> tuple[str, int]:
    """Name and bytes of the device that ran the work. A job of CPU ranks may be on a machine that has GPUs."""
    used = next((span["args"].get("device", 0) for span in spans if span.get("cat") in _DEVICE), None)
    if used is None:
        return "CPU", 0
    devices = [one for one in document.get("deviceProperties") or [] if isinstance(one, dict)]
    own = next((one for one in devices if one.get("id") == used), devices[0] if devices else {})
    return str(own.get("name", "")) or "GPU", int(own.get("totalGlobalMem", 0))


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
    device, device_bytes = _device(document, spans)
    host = _Host([span for span in spans if span.get("cat") in ("cpu_op", "user_annotation")])
    work, waits = _on_device(spans, host), []
    if not work:
        work, waits = on_host.work_of(spans, functools.partial(_around, host))
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
        device=device,
        device_bytes=device_bytes,
        steps=sorted((span["begin"], span["end"]) for span in annotations if _STEP.match(span["name"])),
        work=sorted(work, key=lambda one: (one.begin_ns, one.stream)),
        ranges=sorted(
            (Range(span["begin"], span["end"], span["tid"], span["name"]) for span in annotations),
            key=lambda one: (one.begin_ns, -one.end_ns),
        ),
        blocked=sorted(
            waits
            + [
                (span["begin"], span["end"])
                for span in spans
                if span.get("cat") in _LAUNCHES and _BLOCKS.search(span["name"])
            ]
        ),
        memory=sorted(memory),
    )
    if not profile.steps:
        raise BadProfile(
            f"{path}: no steps (expected ranges ProfilerStep#N: call step() of the profiler after each step of the "
            "loop)"
        )
    return profile
