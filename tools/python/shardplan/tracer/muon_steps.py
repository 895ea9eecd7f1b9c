# SPDX-License-Identifier: Apache-2.0
"""torch.optim.Muon's step of one matrix, as FSDP2's parameters run it: `optimizer_steps` of a trace.

The step is written for whole matrices. DTensor finds a layout for each operator by estimates of what collectives cost.
They depend on the sizes, on the ranks, on the replicas and on how many devices the process sees on its host. So torch
itself runs here: its optimizer on DTensors of fake tensors, in a fake process group.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import unittest.mock
import warnings
from collections.abc import Iterator

import torch
from torch import nn

from shardplan.tracer import record
from shardplan.tracer.collectives import CollectiveProblem
from shardplan.tracer.errors import EnvironmentProblem, TracerError
from shardplan.tracer.fake_meshes import join_fake_group
from shardplan.tracer.muon_matrices import Matrix, matrices
from shardplan.tracer.muon_options import NS_STEPS, MuonOptions, Ranks
from shardplan.tracer.places import one_line
from shardplan.tracer.progress import Progress
from shardplan.tracer.recorder import Recorder, StorageRecord
from shardplan.tracer.shape_propagation import unrecorded_shapes

ROLE = "optimizer_temp"
PARTS = ("update", "orthogonalize", "apply")
# DTensor remembers its choices by mesh, names included, and the process group with them. A mesh of other hosts, or of a
# group that has ended, has to be another one.
_meshes = itertools.count()
_ORTHOGONALIZE = "_zeropower_via_newtonschulz"  # torch's function between the other two parts


def add_optimizer_steps(trace: dict, options: MuonOptions, progress: Progress = Progress()) -> None:
    """Adds `optimizer_steps` to a trace document, which says how they were recorded. Raises TracerError."""
    trace["optimizer_steps"] = optimizer_steps(trace, options, progress)
    trace["recorded_with"] += f"; {options.named}"


def optimizer_steps(trace: dict, options: MuonOptions, progress: Progress = Progress()) -> list[dict]:
    """The step of each different matrix on one rank and on each number of ranks; the matrices are marked in the trace.
    The process joins fake process groups, unless it is one rank alone. Raises TracerError."""
    found = matrices(trace, options.patterns, options.blocks, progress.note)
    if not found:
        progress.note("the model has no matrix of a hidden layer, so optimizer_steps is empty (--muon-matrices)")
    numbers = _Numbers.behind(trace)
    wanted = {}  # a matrix of experts may be like one that is cut
    for matrix in found:
        for ranks in sorted({Ranks(), *(options.ranks if matrix.is_cut else ())}):
            wanted.setdefault((matrix.shape, matrix.dtype, ranks), matrix)
    steps = []
    with record.no_garbage_collection():
        for (shape, _, ranks), matrix in wanted.items():
            if ranks.shards > shape[0]:
                progress.note(
                    f"optimizer_steps is without {_shown(shape)} on {ranks} ranks: torch.optim.Muon refuses a matrix "
                    "with fewer rows than ranks"
                )
                continue
            progress(f"Muon's step of {_shown(shape)} on {_on(ranks)}")
            steps.append(record_step(matrix, ranks, options, numbers))
    return steps


def record_step(matrix: Matrix, ranks: Ranks, options: MuonOptions, numbers: _Numbers | None = None) -> dict:
    """One element of `optimizer_steps`. The process joins a fake process group. Raises TracerError."""
    place = f"torch.optim.Muon's step of {_shown(matrix.shape)} in {matrix.dtype} on {_on(ranks)}"
    try:
        recorder, borders = _record(matrix, ranks, options)
    except CollectiveProblem as error:
        raise TracerError(f"{place}: {error}") from error
    except RuntimeError as error:
        raise TracerError(f"{place} fails: {one_line(error)}") from error
    _check_ends(recorder.storages, place)
    events = (numbers or _Numbers()).renumbered(recorder.events)
    cuts = [0, *borders, len(events)]
    step = {"optimizer": "muon", "ranks": ranks.shards}
    if ranks.replicas > 1:
        step["replicas"] = ranks.replicas
    step |= {"shape": list(matrix.shape), "dtype": matrix.dtype}
    if not options.nesterov:
        step["nesterov"] = False
    if options.ns_steps != NS_STEPS:
        step["ns_steps"] = options.ns_steps
    return step | {part: events[cuts[i] : cuts[i + 1]] for i, part in enumerate(PARTS)}


def _on(ranks: Ranks) -> str:
    return f"{ranks} rank" + ("" if ranks == Ranks() else "s")


def _shown(shape: tuple[int, int]) -> str:
    return f"{shape[0]} x {shape[1]}"


class _Numbers:
    """Numbers of storages and of asynchronous collectives, each once in a trace."""

    def __init__(self, storages: int = 0, works: int = 0):
        self._storages, self._works = storages, works

    @staticmethod
    def behind(trace: dict) -> _Numbers:
        """Numbers behind those that the trace has so far."""
        events = [e for kind in ("forwards", "backwards") for p in trace.get(kind, ()) for e in p["events"]]
        resident = [entry.get("storage", -1) for kind in ("inputs", "buffers") for entry in trace.get(kind, ())]
        storages = max([*(e[1] for e in events if e[0] == "+"), *resident], default=-1)
        works = max((e[11].get("work", -1) for e in events if e[0] == "op" and len(e) > 11), default=-1)
        return _Numbers(storages + 1, works + 1)

    def renumbered(self, events: list[list]) -> list[list]:
        """The events of a step. The shards that it works on have no numbers."""
        storages: dict[int, int] = {}
        works: dict[int, int] = {}
        result = []
        for event in events:
            kind, *rest = event
            if kind == "+":
                storages[rest[0]] = self._storages + len(storages)
                result.append(["+", storages[rest[0]], rest[1], ROLE, -1])
            elif kind == "-":
                result.append(["-", storages[rest[0]]])
            elif kind == "wait":
                result.append(["wait", works[rest[0]]])
            else:
                *facts, read, written, _ = rest[:10]
                more = [dict(details) for details in rest[10:]]
                for details in more:
                    if "work" in details:
                        details["work"] = works.setdefault(details["work"], self._works + len(works))
                ids = ([storages[number] for number in numbers] for numbers in (read, written))
                result.append([kind, *facts, *ids, [], *more])
        self._storages += len(storages)
        self._works += len(works)
        return result


def _check_ends(storages: list[StorageRecord], place: str) -> None:
    """A storage that lives on is no temporary of the step."""
    kept = [s for s in storages if s.died is None or s.phase == "before"]
    if kept:
        raise TracerError(f"{place} keeps {len(kept)} tensors, the first of {kept[0].size_bytes} bytes: expected none")


class _Groups:
    """Communicators of a step: -1 the ranks that the parameter is cut over, -2 its replicas, -3 both together.

    A group is known by its ranks: DTensor keeps its choices, and with them groups of equal meshes before.
    """

    def __init__(self, ranks: Ranks) -> None:
        shards, replicas = range(ranks.shards), range(0, ranks.shards * ranks.replicas, ranks.shards)
        self._communicators = {tuple(range(ranks.shards * ranks.replicas)): -3, tuple(replicas): -2, tuple(shards): -1}

    def of_group(self, group, _exchanges: bool) -> int:
        communicator = self._communicators.get(tuple(torch.distributed.get_process_group_ranks(group)))
        if communicator is None:
            raise CollectiveProblem("a collective among ranks that are no dimension of the mesh")
        return communicator


def _record(matrix: Matrix, ranks: Ranks, options: MuonOptions) -> tuple[Recorder, list[int]]:
    """The events, and the numbers of those before the second and the third part."""
    mesh = _mesh(ranks, options)
    recorder = Recorder(communicators=_Groups(ranks))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(unittest.mock.patch.object(torch.cuda, "device_count", lambda: options.devices_per_host))
        stack.enter_context(record.fake_mode())
        with _device_of_meshes("cuda"):  # that of the tensors of every trace
            tensors = [_made(matrix, mesh) for _ in range(3)]
        stack.enter_context(_device_of_meshes(options.device))
        parameter = nn.Parameter(tensors[0])
        parameter.grad = tensors[1]
        optimizer = torch.optim.Muon([parameter], nesterov=options.nesterov, ns_steps=options.ns_steps)
        optimizer.state[parameter]["momentum_buffer"] = tensors[2]
        for number, tensor in enumerate((parameter, *tensors[1:])):
            recorder.add_parameter(tensor, number, -1)
        stack.enter_context(unrecorded_shapes(recorder.unrecorded))
        stack.enter_context(recorder.watching_collectives())
        borders = stack.enter_context(_orthogonalization(recorder))
        stack.enter_context(recorder)
        recorder.phase = "optimizer"
        try:
            optimizer.step()
        finally:
            recorder.phase = "off"
    if len(borders) != 2:
        raise EnvironmentProblem(
            f"this release of torch orthogonalises in another place than torch.optim._muon.{_ORTHOGONALIZE}"
        )
    recorder.exchanges.end()
    return recorder, borders


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """DTensor warns of its own choices."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _mesh(ranks: Ranks, options: MuonOptions):
    """None: one rank, a plain tensor."""
    if ranks == Ranks():
        return None
    from torch.distributed.device_mesh import DeviceMesh

    join_fake_group(ranks.shards * ranks.replicas)
    numbers = torch.arange(ranks.shards * ranks.replicas, dtype=torch.int).view(ranks.replicas, ranks.shards)
    names = ("replicate", f"shard_{next(_meshes)}")
    if ranks.replicas == 1:
        return DeviceMesh("cpu", numbers[0], mesh_dim_names=names[1:])
    return DeviceMesh("cpu", numbers, mesh_dim_names=names)


@contextlib.contextmanager
def _device_of_meshes(device: str) -> Iterator[None]:
    """Inside, meshes say that they are of this device. Making one asks its device's driver."""
    from torch.distributed.device_mesh import DeviceMesh

    with unittest.mock.patch.object(DeviceMesh, "device_type", property(lambda mesh: device)):
        yield


def _made(matrix: Matrix, mesh) -> torch.Tensor:
    rows, columns = matrix.shape
    dtype = getattr(torch, matrix.dtype)
    if mesh is None:
        return torch.empty(rows, columns, dtype=dtype, device="cuda")
    from torch.distributed.tensor import DTensor, Replicate, Shard

    part = torch.empty(-(-rows // mesh.size(mesh.ndim - 1)), columns, dtype=dtype, device="cuda")
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(matrix.shape), stride=(columns, 1)
    )


@contextlib.contextmanager
def _orthogonalization(recorder: Recorder) -> Iterator[list[int]]:
    """Gives the numbers of the events before torch's function is entered and before it is left."""
    from torch.optim import _muon

    original = getattr(_muon, _ORTHOGONALIZE, None)
    borders: list[int] = []

    def watched(*args, **kwargs):
        borders.append(len(recorder.events))
        try:
            return original(*args, **kwargs)
        finally:
            borders.append(len(recorder.events))

    if original is None:
        yield borders
        return
    with unittest.mock.patch.object(_muon, _ORTHOGONALIZE, watched):
        yield borders
