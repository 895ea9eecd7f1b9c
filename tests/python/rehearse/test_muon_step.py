# SPDX-License-Identifier: Apache-2.0
"""torch.optim.Muon's step with torch's own allocator and NCCL, on the device in software, against the one that
`shardplan trace --muon` records: kernels, collectives, allocations and frees, event for event."""

import json
from dataclasses import dataclass

import pytest
from conftest import installed_pytorch
from muon_events import expected_events, traced_steps
from test_rehearse import SCRIPTS, rehearse

from shardplan.tracer.muon_steps import MuonOptions, Ranks

pytestmark = pytest.mark.skipif(installed_pytorch() != "2.15", reason="DTensor's choices are those of one release")


@dataclass(frozen=True)
class Job:
    name: str
    ranks: Ranks
    shapes: tuple[tuple[int, int], ...]
    dtype: str = "float32"
    gpus_per_node: int = 8

    @property
    def gpus(self) -> int:
        return self.ranks.shards * self.ranks.replicas


JOBS = [
    Job("small", Ranks(2), ((4, 6), (6, 4), (8, 8))),
    Job("rows_not_divisible", Ranks(3), ((7, 9), (7, 5), (5, 12))),
    Job("one_node", Ranks(4), ((1024, 1024), (512, 1024), (64, 14336), (32, 28672))),
    Job("nodes_of_one", Ranks(4), ((1024, 1024), (512, 1024), (64, 14336), (32, 28672)), gpus_per_node=1),
    Job("rows_not_divisible", Ranks(4), ((1022, 1024), (10, 7), (11, 30), (5, 6))),
    Job("bfloat16", Ranks(4), ((1024, 1024), (2048, 8)), dtype="bfloat16"),
    Job("replicas", Ranks(2, 2), ((8, 6), (6, 8), (2048, 512), (512, 2048))),
    Job("llama", Ranks(64), ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))),
    Job("llama_replicas", Ranks(32, 2), ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))),
]
# torch's kernels for operators of a trace, where their names differ. Copies of what lies as it is go by cudaMemcpy.
KERNELS = {
    "aten._to_copy": ["copy"], "aten.contiguous": ["copy"], "aten.clone": ["copy"],
    "aten.constant_pad_nd": ["fill_", "copy"],
}


def kernels(events: list[list]) -> list[list]:
    """Kernels have the names that a recording gives them."""
    found = []
    for event in events:
        if event[0] == "op":
            found += [["op", name] for name in KERNELS.get(event[1], [event[1].removeprefix("aten.")])]
        else:
            found.append(event)
    return found


def second_optimizer(recording: dict) -> list[list]:
    """The recording's events of the second optimizer's step."""
    events = recording["events"]
    ends = {tuple(event[1:]): position for position, event in enumerate(events) if event[0] == "phase"}
    return events[ends["backward", 2] + 1 : ends["optimizer", 2]]


def recorded_events(recording: dict) -> list[list]:
    """Without what was born before, and what an operator takes for itself (cuBLAS's workspace): that dies before the
    operator is seen."""
    found: list[list] = []
    for kind, *rest in second_optimizer(recording):
        if kind == "allocate":
            found.append(["+", rest[3], rest[4]])
        elif kind == "free":
            born = next((i for i in reversed(range(len(found))) if found[i][:2] == ["+", rest[2]]), None)
            if born is not None and all(event[0] in "+-" for event in found[born:]):
                del found[born]
            elif born is not None:
                found.append(["-", rest[2]])
        elif kind == "kernel":
            name = rest[3].removeprefix("aten::")
            found.append(["op", "copy" if name == "copy_" else name])
        elif kind == "copy":
            assert rest[3] == "device_to_device"
            found.append(["op", "copy"])
        elif kind == "collective":
            _, _, _, collective, group, dtype, size_bytes = rest[:7]
            found.append(["collective", collective, dtype, size_bytes, recording["communicators"][group]["ranks"]])
    return numbered(found)


def numbered(events: list[list]) -> list[list]:
    """With numbers in the order of births in place of addresses."""
    numbers, found, born = {}, [], 0
    for event in events:
        if event[0] == "+":
            numbers[event[1]] = born
            born += 1
        found.append([event[0], numbers[event[1]], *event[2:]] if event[0] in "+-" else event)
    return found


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """By job, each rehearsed once."""
    known = {}

    def record(job: Job) -> dict:
        if job not in known:
            path = tmp_path_factory.mktemp(job.name) / "recording.json"
            done = rehearse(
                "-q", "--gpus", job.gpus, "--gpus-per-node", job.gpus_per_node, "--steps", 0, "--record", path, "--",
                "torchrun", "--nproc_per_node", min(job.gpus, job.gpus_per_node), SCRIPTS / "muon.py", job.dtype,
                job.ranks.replicas, *(f"{rows}x{columns}" for rows, columns in job.shapes),
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            known[job] = json.loads(path.read_text())
        return known[job]

    return record


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.name}_{job.ranks}")
def test_a_step_on_the_device_is_the_traced_one(recordings, job):
    options = MuonOptions(devices_per_host=job.gpus_per_node)
    steps = traced_steps(job.shapes, job.dtype, job.ranks, options)
    assert recorded_events(recordings(job)) == kernels(expected_events(steps, job.ranks))


def test_the_hosts_devices_change_the_choice(recordings):
    one_node, nodes = (recorded_events(recordings(job)) for job in JOBS if len(job.shapes) == 4 and job.gpus == 4
                       and job.shapes[0] == (1024, 1024))
    assert one_node != nodes
