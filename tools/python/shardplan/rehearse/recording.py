# SPDX-License-Identifier: Apache-2.0
"""The recording of a rehearsed rank as a document (docs/reference/recording-format.md), from what the device wrote as
it went (device/runtime/recorder.h)."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardplan.command import EXIT_ENVIRONMENT, built_command
from shardplan.files import CannotWrite, replacing

from .device import Device

_LISTS = ("thread", "stream", "place", "communicator")
_BUFFER = 1 << 20


def _lines(path: Path) -> Iterator[str]:
    """The last line of a rank that was killed may be cut off: it was not issued."""
    with path.open(encoding="utf-8", errors="backslashreplace", buffering=_BUFFER) as file:
        for line in file:
            if line.endswith("\n"):
                yield line.rstrip("\n")


def _of_threads(threads: list[str]) -> list[str]:
    """autograd's threads work while the one that called backward waits."""
    names = [json.loads(line)["name"] for line in threads]
    if "main" not in names:
        return threads
    return [
        json.dumps({"name": name, "works_for": names.index("main")}) if name.startswith("pt_autograd") else line
        for name, line in zip(names, threads, strict=True)
    ]


def _with_flops(line: str, flops: dict[str, int]) -> str:
    """A kernel with its floating-point operations, where they are known."""
    if not flops or not line.startswith('["kernel"'):
        return line
    _, _, _, _, name, reads, writes = json.loads(line)
    count = flops.get(
        json.dumps([name, [r["shape"] for r in reads], [w["shape"] for w in writes]], separators=(",", ":")), 0
    )
    return f"{line[:-1]},{count}]" if count else line


def _seen_from(folder: str, place: dict) -> dict:
    """Files below the folder are named as from there: a recording is the same wherever the job lies."""
    for frame in place.get("frames", ()):
        frame["file"] = frame["file"].removeprefix(folder)
    return place


def write(path: str, raw: Path, told: Mapping[str, dict], device: Device, command: list[str]) -> None:
    """Writes the document to `path`, compressed if its name ends in .gz. Line by line: a recording may be larger than
    memory should hold. told: "result" of the rank, and "described", which a rank that was killed lacks."""
    result, described = told["result"], told.get("described", {})
    flops, groups = described.get("flops", {}), described.get("groups", {})
    lists: dict[str, list[str]] = {name: [] for name in _LISTS}
    here = os.path.join(os.getcwd(), "")
    for line in _lines(raw):
        if line.startswith("{"):
            ((name, element),) = json.loads(line).items()
            if name == "communicator":
                element = {**element, **groups.get(element["name"], {"name": ""})}
            elif name == "place":
                element = _seen_from(here, element)
            lists[name].append(json.dumps(element))
    lists["thread"] = _of_threads(lists["thread"])
    head = {
        "schema": "shardplan.recording/1",
        "job": " ".join(os.path.basename(word) for word in command),
        "recorded_with": f"torch {result['torch']}",
        "device": device.name,
        "rank": result["rank"],
        "world_size": result["world_size"],
    }

    def text() -> Iterator[str]:
        yield "{\n" + "".join(f'  "{name}": {json.dumps(value)},\n' for name, value in head.items())
        for name, elements in lists.items():
            separator = ",\n    ".join(elements)
            yield f'  "{name}s": [' + (f"\n    {separator}\n  ],\n" if elements else "],\n")
        yield '  "events": ['
        between = "\n    "
        for line in _lines(raw):
            if line.startswith("["):
                yield between + _with_flops(line, flops)
                between = ",\n    "
        yield "\n  ]\n}\n" if between.startswith(",") else "]\n}\n"

    with replacing(path) as file:
        if path.endswith(".gz"):
            with gzip.GzipFile("", "wb", 6, file.buffer, mtime=0) as packed:
                for piece in text():
                    packed.write(piece.encode())
        else:
            file.writelines(text())


def partners(raw: Path, told: Mapping[str, dict]) -> list[int]:
    """Ranks that do other things than this one: those to which it sends more than it receives with it in one kernel, or
    the reverse. The stages of a pipeline; not a ring, whose ranks are alike."""
    groups = told.get("described", {}).get("groups", {})
    ranks: list[list[int]] = []  # by communicator
    step: list[tuple] = []  # messages of the step: kind, communicator, bytes, peer, kernel
    last, number_of_last = [], 0  # of the last whole one
    for number, line in enumerate(_lines(raw)):
        if line.startswith('{"communicator"'):
            ranks.append(groups.get(json.loads(line)["communicator"]["name"], {}).get("ranks", []))
        elif line.startswith('["collective"') and ('"send"' in line or '"recv"' in line):
            _, _, _, _, kind, group, _, size, _, _, peer, batch = json.loads(line)
            step.append((kind, group, size, peer, batch if batch >= 0 else f"alone {number}"))
        elif line.startswith('["phase","optimizer"'):
            ended = json.loads(line)[2]
            step, last, number_of_last = [], (last if ended == number_of_last else []) + step, ended
    surplus: dict[object, int] = {}  # bytes, by kernel
    peers: dict[object, set[int]] = {}
    for kind, group, size, peer, kernel in last:
        surplus[kernel] = surplus.get(kernel, 0) + (size if kind == "send" else -size)
        if ranks[group]:
            peers.setdefault(kernel, set()).add(ranks[group][peer])
    return sorted(set().union(*(among for kernel, among in peers.items() if surplus[kernel])))


@dataclasses.dataclass(frozen=True)
class Time:
    """The time of the last whole step on the cluster."""

    text: str
    report: dict  # shardplan.report/1


class NoTime(Exception):
    """The cluster cannot say it: it lacks links, or ranks."""


def time_of(
    paths: list[str], device: Device, tokens: int, pictures: Mapping[str, str | None], scratch: Path
) -> Time:
    """paths: recordings of ranks that wait for each other. pictures: files by option of `shardplan simulate`. Raises
    NoTime, NoCommand, CannotWrite."""
    cluster, report = scratch / "cluster.json", scratch / "report.json"
    cluster.write_text(device.document)
    words = [
        built_command("rehearse"), "simulate", *paths, "--cluster", str(cluster), "-q", "--report", str(report),
        "--tokens", str(tokens),
    ]  # fmt: skip
    done = subprocess.run(
        [*words, *(word for option, file in pictures.items() if file for word in (option, file))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        said = done.stderr.strip().removeprefix("shardplan: error: ").replace(str(cluster), device.cluster)
        raise CannotWrite(said) if done.returncode == EXIT_ENVIRONMENT else NoTime(said)
    return Time(done.stdout.rstrip(), json.loads(report.read_text()))


@dataclasses.dataclass(frozen=True)
class Proof:
    code: int
    text: str
    wrong: str
    modes: tuple[str, ...]  # of the device, that show each race as a wrong number; "?": not known


_MODE = re.compile(r"^race \d+ is shown by SHARDPLAN_DEVICE_MODE=(\S+)\n", re.MULTILINE)


def prove(path: str) -> Proof:
    """The verdict of `shardplan validate` on the recording. Raises NoCommand."""
    done = subprocess.run(
        [built_command("rehearse"), "validate", "--schedules", path], capture_output=True, text=True, check=False
    )
    said = _MODE.sub("", done.stdout).replace(f"{path}: ", "").rstrip()
    return Proof(done.returncode, said, done.stderr.rstrip(), tuple(_MODE.findall(done.stdout)))
