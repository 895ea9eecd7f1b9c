#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Mutations of the cuda backend: each has to give a wrong number or an error on the device in software, in lazy mode.
The proof that nothing races has to find it, too, if it takes an order out (tests/python/races/executor_proof.py).

    tests/device/mutations.py [NAME...]      needs build/dev; prints a line for each, exit code 1 when one is not seen
    tests/device/mutations.py --proof [NAME...]     only the proof: a minute less for each
    tests/device/mutations.py --list         their names, one a line

A mutation is an edit of a source of `executor/src/cuda`. The library's unity file is compiled again with the edited
copy, with the build's own command, and the conformance suite is linked with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python" / "races"))

from executor_proof import record  # noqa: E402

BUILD = pathlib.Path(os.environ.get("SHARDPLAN_BUILD", ROOT / "build" / "dev")).resolve()
SUITE = "tests/executor/executor_cuda_conformance_test"
RANKS, EVERY = 2, 20  # of the suite's plans
SEEDS = (1, 2, 3)
LIMIT_S = 300  # several times what the suite takes as it is
NUMBERS = f"*EveryNumberIsRight/cuda_ranks{RANKS}"


@dataclasses.dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    old: str
    new: str
    tests: str = NUMBERS
    proof: str = "races"  # "none": it takes no order out that the recording of rank 0 has


WAIT = 'return CheckCuda(cudaStreamWaitEvent(streams_[stream].stream(), events_[event], 0), "waiting for an event");'
MUTATIONS = [
    Mutation("no mutation", "device.cc", WAIT, WAIT, proof="none"),
    Mutation("no wait", "device.cc", WAIT, "return {};"),
    Mutation(
        "every 7th wait lost",
        "device.cc",
        WAIT,
        f"static int number = 0; if (++number % 7 == 0) return {{}}; {WAIT}",
    ),
    Mutation(
        "no record_stream",
        "device.cc",
        "c10::cuda::CUDACachingAllocator::recordStream(part.storage().data_ptr(), streams_[stream]);",
        "",
    ),
    Mutation(
        "copies on the wrong stream",
        "device.cc",
        "Status CudaDevice::Copy(CopyId id, StreamId stream) {",
        "Status CudaDevice::Copy(CopyId id, StreamId stream) { stream = 0;",
    ),
    Mutation(
        "memory of the wrong stream",
        "device.cc",
        "at::Tensor CudaDevice::MakeTensor(std::int64_t numel, DType dtype, MemoryKind memory, StreamId stream) {",
        "at::Tensor CudaDevice::MakeTensor(std::int64_t numel, DType dtype, MemoryKind memory, StreamId stream) { "
        "stream = 0;",
    ),
    Mutation(
        "records on the wrong stream",
        "device.cc",
        "events_[event], streams_[stream].stream())",
        "events_[event], streams_[0].stream())",
    ),
    Mutation(
        "no host wait", "device.cc", "cudaEventSynchronize(events_[event])", "cudaSuccess",
        proof="none",  # a device that computes does not record what the host reads
    ),
    Mutation(
        "no wait before memory of the arena is used again",
        "device.cc",
        "if (!std::exchange(left.pending, false)) continue;",
        "continue;",
    ),
    Mutation(
        "collectives on the wrong stream",
        "nccl_collectives.cc",
        "const cudaStream_t cuda_stream = device_.stream(stream).stream();",
        "const cudaStream_t cuda_stream = device_.stream(0).stream();",
    ),
    Mutation(
        "no device named",
        "device.h",
        "OnDevice Here() const { return OnDevice(static_cast<c10::DeviceIndex>(index_)); }",
        "OnDevice Here() const { return OnDevice(static_cast<c10::DeviceIndex>(0)); }",
        proof="none",  # rank 0 is on device 0
    ),
    Mutation(
        "communicators are not aborted",
        "nccl_communicators.cc",
        "void NcclCommunicators::Abort() {",
        "void NcclCommunicators::Abort() { return;",
        "*ARankThatFailsInAStep*",
        proof="none",
    ),
]


def commands_of(target: str) -> list[str]:
    return subprocess.run(
        ["ninja", "-C", BUILD, "-t", "commands", target], capture_output=True, text=True, check=True
    ).stdout.splitlines()


def mutated_sources(mutation: Mutation, folder: pathlib.Path) -> pathlib.Path:
    """A copy of executor/src/cuda with the edit; include paths find it first."""
    copy = folder / "cuda"
    copy.mkdir(parents=True)
    assert (ROOT / "executor" / "src" / "cuda" / mutation.file).exists(), f"{mutation.name}: no {mutation.file}"
    for source in (ROOT / "executor" / "src" / "cuda").iterdir():
        text = source.read_text()
        if source.name == mutation.file:
            assert text.count(mutation.old) >= 1, f"{mutation.name}: {source.name} has no such text"
            text = text.replace(mutation.old, mutation.new)
        (copy / source.name).write_text(text)
    return copy


def build(mutation: Mutation, folder: pathlib.Path) -> pathlib.Path:
    copy = mutated_sources(mutation, folder)
    entries = json.loads((BUILD / "compile_commands.json").read_text())
    objects = []
    for number, entry in enumerate(e for e in entries if "shardplan_executor_cuda.dir" in e["command"]):
        source = pathlib.Path(entry["file"])
        unity = folder / f"unity{number}.cc"
        unity.write_text(source.read_text().replace(str(ROOT / "executor" / "src" / "cuda"), str(copy)))
        command = shlex.split(entry["command"])
        command[command.index("-c") + 1] = str(unity)
        command[command.index("-o") + 1] = str(unity.with_suffix(".o"))
        command.insert(command.index("-c"), f"-I{folder}")
        at = next(i for i, word in enumerate(command) if word.startswith("-I"))
        command.insert(at, command.pop(command.index(f"-I{folder}")))
        subprocess.run(command, cwd=entry["directory"], check=True)
        objects.append(str(unity.with_suffix(".o")))
    (link,) = [line for line in commands_of(SUITE)[-1:]]
    words = shlex.split(link.split("&&")[1])
    program = folder / "suite"
    words[words.index("-o") + 1] = str(program)
    at = next(i for i, word in enumerate(words) if word.endswith("libshardplan_executor_cuda.a"))
    words[at:at] = objects
    subprocess.run(words, cwd=BUILD, check=True)
    return program


def is_seen(program: pathlib.Path, tests: str, seed: int) -> str:
    """"" or the first line that says what is wrong."""
    environment = {**os.environ, "SHARDPLAN_DEVICE_MODE": f"lazy:{seed}", "SHARDPLAN_EVERY": str(EVERY)}
    library = BUILD / "device" / "libshardplan_device.so"
    command = [ROOT / "dev" / "on_device", library, program, f"--gtest_filter={tests}"]
    run = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        output, _ = run.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)  # the suite's ranks, too
        run.communicate()
        return f"does not end within {LIMIT_S} s"
    if run.returncode == 0:
        return ""
    wrong = [line for line in output.splitlines() if "rank" in line and "instead of" in line] or [
        line for line in output.splitlines() if "rank" in line and "[" not in line and not line.startswith("Note:")
    ]
    return wrong[0].strip() if wrong else f"exit code {run.returncode}"


def seen_by_numbers(mutation: Mutation, program: pathlib.Path) -> tuple[bool, str]:
    """Whether it is as it has to be, and what to print."""
    seen = {seed: what for seed in SEEDS if (what := is_seen(program, mutation.tests, seed))}
    example = next(iter(seen.values()), "")[:120]
    return bool(seen) == (mutation.name != "no mutation"), f"seen under {len(seen)} of {len(SEEDS)} seeds. {example}"


def seen_by_the_proof(mutation: Mutation, program: pathlib.Path) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as folder:
        proof = record(program, RANKS, EVERY, folder, LIMIT_S).proof()
    first = proof.races[0].partition(": ")[2] if proof.races else ""
    return proof.verdict == mutation.proof, f"the proof: {proof.verdict}. {first}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--proof", action="store_true", help="only the proof")
    parser.add_argument("--list", action="store_true", help="prints the names, and ends")
    options = parser.parse_args()
    if options.list:
        print("\n".join(mutation.name for mutation in MUTATIONS))
        return 0
    ways = [seen_by_the_proof] if options.proof else [seen_by_numbers, seen_by_the_proof]
    cases = missed = 0
    for mutation in MUTATIONS:
        if options.names and mutation.name not in options.names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            program = build(mutation, pathlib.Path(folder))
            results = [way(mutation, program) for way in ways]
        cases += 1
        missed += not all(good for good, _said in results)
        print(f"{mutation.name}: {' '.join(said for _good, said in results)}", flush=True)
    print(f"cases {cases}, failures {missed}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
