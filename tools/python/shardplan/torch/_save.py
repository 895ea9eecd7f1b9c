"""Checkpoints of a model and its optimizer as torch.distributed.checkpoint directories.

Names and shapes are those of the original parameters, so a job of another world size, another policy, or real FSDP1 and FSDP2 loads them. A
folder is whole or absent: it is written beside its place and takes its name when all ranks have written.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

_METADATA = ".metadata"


class Saving:
    """A save in the background."""

    def __init__(self, future: Future, folder: Path, group) -> None:
        self._future, self._folder, self._group = future, folder, group

    def done(self) -> bool:
        """Whether this rank has written."""
        return self._future.done()

    def wait(self) -> None:
        """Until the checkpoint has its name. Raises what kept it from being written. Collective."""
        failed: BaseException | None = None
        try:
            self._future.result()
        except BaseException as error:  # on every rank, or the others would wait for this one
            failed = error
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
        _finish(self._folder, failed)


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _together(error: BaseException | None) -> list[str]:
    """What went wrong on the ranks. Collective."""
    said = f"{type(error).__name__}: {error}" if error is not None else ""
    if not dist.is_initialized():
        return [said]
    of_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, said)
    return of_ranks


def _raise_if_any(what: str, said: list[str]) -> None:
    wrong = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]
    if wrong:
        raise RuntimeError(f"shardplan: {what}: " + "; ".join(wrong))


def _beside(folder: Path) -> Path:
    return folder.with_name(f".shardplan-{folder.name}.partial")


def _flush(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _prepare(folder: Path) -> None:
    failed: BaseException | None = None
    if _first():
        try:
            if folder.exists():
                raise FileExistsError(f"{folder} exists")
            shutil.rmtree(_beside(folder), ignore_errors=True)  # of a save that was killed
            _beside(folder).mkdir(parents=True)
        except OSError as error:
            failed = error
    _raise_if_any(f"cannot save to {folder}", _together(failed))


def _finish(folder: Path, failed: BaseException | None) -> None:
    said = _together(failed)
    if not any(said) and _first():
        try:
            _flush(_beside(folder))
            _beside(folder).rename(folder)
        except OSError as error:
            failed = error
    elif any(said) and _first():
        shutil.rmtree(_beside(folder), ignore_errors=True)
    _raise_if_any(f"cannot save to {folder}", said if any(said) else _together(failed))


def _state_of(model: nn.Module, optimizers) -> dict:
    state = get_state_dict(model, optimizers)
    return {"model": state[0], "optimizer": state[1]}


def save(folder: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | tuple = (), asynchronous: bool = False) -> Saving | None:
    """Writes the parameters, the buffers, and the state of the optimizer (or of several) to a new folder. asynchronous: the state is copied to
    host memory now and written while training goes on; `wait()` of what is returned ends it. Collective."""
    folder = Path(folder)
    _prepare(folder)
    failed: BaseException | None = None
    try:
        state = _state_of(model, optimizer)
        if asynchronous:
            # The ranks that write agree beside the training, whose collectives are of other groups.
            group = dist.new_group(backend="gloo") if dist.is_initialized() else None
            return Saving(dcp.async_save(state, checkpoint_id=_beside(folder), process_group=group), folder, group)
        dcp.save(state, checkpoint_id=_beside(folder))
    except Exception as error:  # told on all ranks
        failed = error
    _finish(folder, failed)
    return None


def load(folder: str | os.PathLike, model: nn.Module, optimizer: torch.optim.Optimizer | tuple = ()) -> None:
    """Reads what `save`, or a job that saved `get_state_dict` under "model" and "optimizer", wrote: at any world size and layout. Each rank
    reads what it holds. Collective."""
    folder = Path(folder)
    missing = None if (folder / _METADATA).exists() else FileNotFoundError(f"{folder / _METADATA}: no checkpoint of torch.distributed.checkpoint is there")
    _raise_if_any(f"cannot load {folder}", _together(missing))
    state = _state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
