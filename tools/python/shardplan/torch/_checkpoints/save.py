# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a model and its optimizer as torch.distributed.checkpoint directories.

Names and shapes are those of the original parameters, so a job of another world size, another policy, or real FSDP1 and
FSDP2 loads them. This file finds out what each rank holds. The compiled module writes and reads the files
(executor/session.h); it runs nothing that a file holds.
"""

from __future__ import annotations

import atexit
import functools
import io
import itertools
import multiprocessing.util
import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .._job.arguments import default_timeout_s
from .._job.native import native
from .._job.peers import peers
from .._job.store import job_store

_READ_BYTES = 64 << 20  # on the host, of what a device gets

Box = tuple[list[int], list[int]]  # low, size
Tensors = dict[str, tuple[str, list[int]]]  # dtype and shape by name

_sessions: weakref.WeakKeyDictionary[nn.Module, _Session] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
_under_way: list[Saving] = []  # that nobody has waited for


class _Session:
    """The native session of a model, and the save that is under way."""

    def __init__(self) -> None:
        store, rank, ranks = None, 0, 1
        number = next(_numbers)
        if dist.is_initialized():
            rank, ranks = dist.get_rank(), dist.get_world_size()
            store = dist.PrefixStore(f"saves/{number}", job_store(default_timeout_s()))
        self.rank, self.ranks = rank, ranks
        self.peers = peers()  # leaves at the end of the interpreter, if it is still here
        self.native = native.Session(store, rank, ranks, self.peers, default_timeout_s())
        self.saving: Saving | None = None
        _wait_at_the_end()  # registered behind the peers' end, so it comes before

    def finish(self) -> None:
        """Ends the save that is under way. Collective."""
        if self.saving is not None:
            self.saving.wait()


class Saving:
    """A save in the background."""

    def __init__(self, session: _Session, folder: Path, held_s: float) -> None:
        self._session, self._folder = session, folder
        self._held_s, self._steps, self._figures = held_s, 0, None
        # The copies are made beside the training: what they are made of is not to change before.
        _under_way.append(self)
        self._hooks = [
            register_optimizer_step_pre_hook(self._hold_back),
            register_optimizer_step_post_hook(self._count),
        ]

    def _hold_back(self, *_args) -> None:
        self._session.native.hold_back()

    def _count(self, *_args) -> None:
        self._steps += not self.done()

    def done(self) -> bool:
        """Whether this rank's part of the save is over."""
        return not self._session.native.is_saving

    def wait(self) -> None:
        """Until the checkpoint has its name. Raises what kept it from being written, on all ranks; once. Collective."""
        session, begin = self._session, time.perf_counter()
        if session.saving is not self:
            return
        session.saving = None
        _under_way.remove(self)
        for hook in self._hooks:
            hook.remove()
        try:
            session.native.wait()
        except RuntimeError as error:
            raise RuntimeError(f"shardplan: cannot save to {self._folder}: {error}") from None
        finally:
            self._held_s += time.perf_counter() - begin
            self._figures = session.native.figures

    def cost(self) -> dict[str, float]:
        """After wait(): bytes that this rank wrote, and seconds for which the training loop was held (by save and by
        wait). Also seconds until the folder had its name, optimizer steps made meanwhile, and the seconds held per such
        step."""
        if self._figures is None:
            raise RuntimeError("shardplan: the save is not over: wait() first")
        steps = max(1, self._steps)
        return {
            "bytes": self._figures[0], "held_s": self._held_s, "saved_s": self._figures[2], "steps": self._steps,
            "held_s_per_step": self._held_s / steps,
        }


def _end() -> None:
    """A loop that ends without wait() has its checkpoint all the same."""
    for saving in list(_under_way):
        try:
            saving.wait()
        except RuntimeError as error:  # there is nobody to raise it to
            print(error, file=sys.stderr)


@functools.cache
def _wait_at_the_end() -> None:
    """Once in a process."""
    atexit.register(_end)
    multiprocessing.util.Finalize(None, _end, exitpriority=1)  # its processes do not run atexit


def _session_of(model: nn.Module) -> _Session:
    if model not in _sessions:
        _sessions[model] = _Session()
    return _sessions[model]


def _from_all(mine: Callable[[], object]) -> list:
    """The results of `mine` on all ranks. Raises, on all ranks, what any of them raised. Collective."""
    failure: BaseException | None = None
    value = None
    try:
        value = mine()
    except Exception as error:  # told on all ranks
        failure = error
    said = f"{type(failure).__name__}: {failure}" if failure is not None else ""
    of_ranks: list = [(said, value)]
    if dist.is_initialized():
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (said, value))
    wrong = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(of_ranks) if text]
    if wrong:
        raise RuntimeError("; ".join(wrong)) from failure
    return [value for _, value in of_ranks]


def _state_of(model: nn.Module, optimizers) -> tuple[dict, dict]:
    """By flat name, and the keys that each comes from."""
    state = get_state_dict(model, optimizers)
    return flatten_state_dict({"model": state[0], "optimizer": state[1]})


def _held(name: str, value: torch.Tensor) -> tuple[torch.Tensor, Box | None]:
    """The tensor that this rank has of it, and the box of the whole that it is; None: nothing."""
    if not isinstance(value, DTensor):
        return value, ([0] * value.dim(), list(value.shape)) if value.numel() > 0 else None
    if any(placement.is_partial() for placement in value.placements):
        raise ValueError(f"{name} is a sum that is not yet made ({value.placements})")
    local = value.to_local()
    if value.device_mesh.get_coordinate() is None or local.numel() == 0:
        return local, None
    size, low = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if tuple(size) != tuple(local.shape):
        raise ValueError(f"{name}: this rank holds {tuple(local.shape)}, and by its placements {tuple(size)}")
    return local, (list(low), list(size))


def _pickled(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# ---- saving ----


def _described(state: dict) -> tuple[Tensors, dict[str, Box], dict[str, bytes]]:
    """This rank's tensors, its box of each, and objects."""
    tensors, boxes, objects = {}, {}, {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            objects[name] = _pickled(value)
            continue
        tensors[name] = (_dtype(value), list(value.shape))
        box = _held(name, value)[1]
        if box is not None:
            boxes[name] = box
    return tensors, boxes, objects


def _shared_out(
    of_ranks: list[tuple[Tensors, dict[str, Box], dict[str, bytes]]],
) -> tuple[Tensors, list[tuple], dict[str, bytes]]:
    """All tensors; who writes which box of which (its index): of ranks that hold the same, the one with the fewest
    bytes so far; all objects."""
    tensors: Tensors = {}
    objects: dict[str, bytes] = {}
    for rank, (own, _, own_objects) in enumerate(of_ranks):
        for name, kind in own.items():
            if tensors.setdefault(name, kind) != kind:
                raise RuntimeError(f"shardplan: {name} is {tensors[name]} on one rank, and {kind} on rank {rank}")
        objects = {**own_objects, **objects}
    boxes, elements = [], [0] * len(of_ranks)
    for index, name in enumerate(tensors):
        holders: dict[tuple, list[int]] = {}
        for rank, (_, own_boxes, _) in enumerate(of_ranks):
            if name in own_boxes:
                low, size = own_boxes[name]
                holders.setdefault((tuple(low), tuple(size)), []).append(rank)
        for (low, size), ranks in holders.items():
            writer = min(ranks, key=lambda rank: elements[rank])
            elements[writer] += torch.Size(size).numel()
            boxes.append((index, writer, list(low), list(size)))
    return tensors, boxes, objects


def save(
    folder: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | tuple = (),
    asynchronous: bool = False,
    replace: bool = False,
) -> Saving | None:
    """Writes the parameters, the buffers, and the state of the optimizer (or of several) to a new folder, between two
    steps. asynchronous: the state is copied to host memory (on a GPU to pinned memory, beside the training). It is
    written while training goes on; `wait()` of the returned Saving ends it, or the next save. replace: a checkpoint
    that is there stays until the new one is whole. Collective."""
    begin, folder = time.perf_counter(), Path(folder)
    session = _session_of(model)
    session.finish()
    try:
        found: list[tuple[dict, dict]] = []

        def describe():
            found.append(_state_of(model, optimizer))
            return _described(found[0][0])

        tensors, boxes, objects = _shared_out(_from_all(describe))
        (state, keys), names = found[0], list(tensors)
        own = [
            _held(names[box[0]], state[names[box[0]]])[0].detach().contiguous()
            for box in boxes
            if box[1] == session.rank
        ]
        listed = [(name, *kind) for name, kind in tensors.items()]
        session.native.save(
            str(folder),
            listed,
            boxes,
            objects,
            {name: list(path) for name, path in keys.items()},
            own,
            asynchronous,
            replace,
        )
    except RuntimeError as error:
        raise RuntimeError(f"shardplan: cannot save to {folder}: {error}") from None
    if asynchronous:
        session.saving = Saving(session, folder, time.perf_counter() - begin)
    return session.saving


# ---- loading ----


def _rows(box: Box, row_bytes: int) -> list[Box]:
    """The box in parts that are not too large, cut along its first dimension."""
    low, size = box
    if not size:
        return [box]
    at_once = max(1, _READ_BYTES // max(1, row_bytes))
    return [([low[0] + i, *low[1:]], [min(at_once, size[0] - i), *size[1:]]) for i in range(0, size[0], at_once)]


def _read_into(checkpoint, name: str, box: Box, dtype: str, tensor: torch.Tensor) -> None:
    if tensor.device.type == "cpu" and tensor.is_contiguous() and _dtype(tensor) == dtype:
        checkpoint.read(name, *box, tensor)
        return
    row = torch.Size(box[1][1:]).numel() * getattr(torch, dtype).itemsize
    for low, size in _rows(box, row):
        part = torch.empty(size, dtype=getattr(torch, dtype))
        checkpoint.read(name, low, size, part)
        (tensor.narrow(0, low[0] - box[0][0], size[0]) if size else tensor).copy_(part)


@torch.no_grad()
def _read_own(folder: Path, state: dict, strict: bool) -> None:
    checkpoint = native.Checkpoint(str(folder))
    saved, objects = checkpoint.tensors, checkpoint.objects
    missing = [
        name for name, value in state.items() if name not in (saved if isinstance(value, torch.Tensor) else objects)
    ]
    if missing and strict:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise KeyError(f"the checkpoint has no {missing[0]}{more} (strict=False keeps what the model has)")
    for name, value in state.items():
        if name in missing:
            continue
        if not isinstance(value, torch.Tensor):
            state[name] = torch.load(io.BytesIO(objects[name]), weights_only=True)
            continue
        dtype, shape = saved[name]
        if list(value.shape) != shape:
            raise ValueError(f"{name} has the shape {shape} in the checkpoint, and {list(value.shape)} in the model")
        tensor, box = _held(name, value)
        if box is not None:
            _read_into(checkpoint, name, box, dtype, tensor.detach())
    checkpoint.check_unchanged()


def load(
    folder: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | tuple = (), strict: bool = True
) -> None:
    """Reads what `save`, `shardplan reshard-checkpoint`, or a job that saved `get_state_dict` under "model" and
    "optimizer", wrote: at any world size and layout, and any format that has these names. Each rank reads what it
    holds; nothing that a file holds is run. strict=False: what the checkpoint lacks stays as it is. Collective."""
    folder = Path(folder)
    _session_of(model).finish()
    try:
        found: list[tuple[dict, dict]] = []

        def read():
            found.append(_state_of(model, optimizer))
            _read_own(folder, found[0][0], strict)

        _from_all(read)
    except RuntimeError as error:
        raise RuntimeError(f"shardplan: cannot load {folder}: {error}") from None
    state = unflatten_state_dict(*found[0])
    # By flat names an optimizer that keeps no state (SGD without momentum) has none; set_state_dict tells the two forms
    # apart by it.
    of_optimizer = {"state": {}, **state["optimizer"]} if "optimizer" in state else {}
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=of_optimizer)
