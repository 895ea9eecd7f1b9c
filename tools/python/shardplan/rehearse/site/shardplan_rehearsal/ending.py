# SPDX-License-Identifier: Apache-2.0
"""How a rehearsed rank ends, and what it tells the command: behind the steps that were asked for, or with its
script."""

from __future__ import annotations

import atexit
import dataclasses
import linecache
import os
import sys
import sysconfig
import time
import traceback
from types import ModuleType

from . import checkpoints, device, history, kept, modules, rank, recording
from .phases import Recorder
from .run import stop, the_run

_began = 0.0


def begin(torch: ModuleType, recorder: Recorder) -> None:
    """Tells the command how it ends: when an error comes out of the script, else with Python's exit handlers. A library
    may crash in between."""
    global _began
    _began = time.monotonic()
    told: list[str] = []

    def tell(end: str, error: BaseException | None) -> None:
        if told or not rank.is_this_process():
            return
        told.append(end)
        checkpoints.take_away_empty_folders()
        earlier = the_run().told("result")
        if recorder.steps_done or recorder.backwards or not earlier or not earlier["steps"]:
            _tell(torch, recorder, end, error)
        if the_run().keep and the_run().until is None:
            kept.start()

    def at_exit() -> None:
        error = getattr(sys, "last_value", None)
        tell("raised" if error is not None else "script", error)

    def done() -> None:
        if rank.is_this_process():
            tell("steps", None)
            stop(0)

    def step_ends() -> None:
        """For a process that is killed later."""
        if rank.is_this_process():
            the_run().tell("result", _document(torch, recorder, "killed", None, ""))

    say = sys.excepthook

    def excepthook(kind: type, error: BaseException, trace: object) -> None:
        say(kind, error, trace)
        tell("raised", error)

    sys.excepthook = excepthook
    atexit.register(at_exit)
    recorder.when_done, recorder.when_step_ends = done, step_ends


def _tell(torch: ModuleType, recorder: Recorder, end: str, error: BaseException | None) -> None:
    run = the_run()
    place = recorder.place()
    recorder.end()
    document = _document(torch, recorder, end, error, place)
    run.tell("result", document)  # whatever happens to the rest
    recording.end(torch)
    if not torch.cuda.is_initialized():
        return
    if run.snapshot:
        torch.cuda.memory._dump_snapshot(run.snapshot)
    if run.history:
        document["peak"] = _peak(torch, recorder, document["allocated_bytes"])
        run.tell("result", document)


def _document(torch: ModuleType, recorder: Recorder, end: str, error: BaseException | None, place: str) -> dict:
    """The document that the command reads (text.py, report.py and page.py beside site/)."""
    stretches = recorder.stretches
    place_in_job = recorder.place_in_job or (
        int(os.environ.get("RANK", the_run().rank)),
        int(os.environ.get("WORLD_SIZE", "1")),
    )
    return {
        "end": end,
        "seconds": round(time.monotonic() - _began, 1),
        "torch": torch.__version__,
        "rank": place_in_job[0],
        "world_size": place_in_job[1],
        "steps": recorder.steps_done,
        "backwards": recorder.backwards,
        "stretches": [dataclasses.asdict(stretch) for stretch in stretches],
        "allocated_bytes": max(stretch.allocated_bytes for stretch in stretches),
        "reserved_bytes": max(stretch.reserved_bytes for stretch in stretches),
        "steady_bytes": recorder.steady_bytes,
        "communicators": device.communicators,
        "error": _error(torch, error, place) if error is not None else None,
    }


def _peak(torch: ModuleType, recorder: Recorder, most_bytes: int) -> dict | None:
    traces = torch.cuda.memory._snapshot()["device_traces"]
    number = torch.cuda.current_device()
    trace = traces[number] if number < len(traces) else []
    peak = history.peak_of(trace, recorder.stretches, recorder.addresses, most_bytes)
    if peak is None:
        return None
    stretch = recorder.stretches[min(peak.stretch, len(recorder.stretches) - 1)]
    return {**dataclasses.asdict(peak), "step": stretch.step, "phase": stretch.phase, "events": len(trace)}


def _error(torch: ModuleType, error: BaseException, place: str) -> dict:
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if not _is_in(frame.filename, "stdlib", "purelib", "platlib")]
    of_others = [
        frame
        for frame in frames
        if not _is_in(frame.filename, "stdlib") and not frame.filename.startswith(os.path.dirname(torch.__file__))
    ]
    frame = (of_user or of_others or frames or [None])[-1]
    return {
        "type": type(error).__name__,
        "kinds": [kind.__name__ for kind in type(error).__mro__],
        "message": str(error),
        "out_of_memory": isinstance(error, torch.OutOfMemoryError),
        "place": place,
        "file": frame.filename if frame else "",
        "line": frame.lineno if frame else 0,
        "code": linecache.getline(frame.filename, frame.lineno).strip() if frame else "",
        "module": _module_of(error),
    }


def _is_in(file: str, *folders: str) -> bool:
    """Whether a file is the interpreter's, in one of these folders of sysconfig, or ours, or none."""
    places = [sysconfig.get_paths()[name] for name in folders]
    return file.startswith("<") or any(
        file.startswith(folder + os.sep) for folder in (*places, os.path.dirname(__file__))
    )


def _module_of(error: BaseException) -> str:
    """The innermost module in whose method it was raised."""
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        try:
            found = modules.name_of(owner) or found
        except TypeError:  # no weak reference to it
            pass
    return found
