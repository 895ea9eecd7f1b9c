# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a rehearsed run: their bulk goes nowhere, and numbers that are read have no meaning.

No file that was there before is touched: a run folder may hold checkpoints of a real training.
torch.distributed.checkpoint.save and async_save make the folder, since the script may put other files there. They write
nothing into it and remove it at the end if it is empty. The functions torch.save and safetensors' save_file write up to
16 MiB of tensors, and an empty file above. A torch.distributed.checkpoint.load of a folder that has a checkpoint, or
that this run has saved to, leaves the tensors as they are.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from types import ModuleType

_SMALL_BYTES = 16 << 20
_saved: set[str] = set()  # folders, by their real paths
_made: list[str] = []  # of them those that were not there
_written: set[str] = set()  # files of this run


def patch_saver(module: ModuleType) -> None:
    from torch.distributed.checkpoint.metadata import Metadata

    def save(
        state_dict: dict,
        *_arguments: object,
        checkpoint_id: object = None,
        storage_writer: object = None,
        **_settings: object,
    ) -> object:
        folder = checkpoint_id if checkpoint_id is not None else getattr(storage_writer, "path", None)
        if isinstance(folder, str | os.PathLike) and "://" not in os.fspath(folder):
            _make_folder(os.fspath(folder))
        return Metadata(state_dict_metadata={})

    def async_save(state_dict: dict, *_arguments: object, async_stager: object = None, **settings: object) -> object:
        from concurrent.futures import Future

        save(state_dict, **settings)
        done: Future = Future()
        done.set_result(None)
        response = getattr(module, "AsyncSaveResponse", None)
        return response(done, done) if async_stager is not None and response is not None else done

    def save_state_dict(state_dict: dict, storage_writer: object, *_arguments: object, **_settings: object) -> object:
        return save(state_dict, storage_writer=storage_writer)

    _replace(module, save, async_save, save_state_dict)


def patch_loader(module: ModuleType) -> None:
    own = module.load

    def load(
        state_dict: dict,
        *arguments: object,
        checkpoint_id: object = None,
        storage_reader: object = None,
        **settings: object,
    ) -> None:
        folder = checkpoint_id if checkpoint_id is not None else getattr(storage_reader, "path", None)
        if folder is not None and (
            os.path.realpath(folder) in _saved or os.path.isfile(os.path.join(os.fspath(folder), ".metadata"))
        ):
            return None
        return own(state_dict, *arguments, checkpoint_id=checkpoint_id, storage_reader=storage_reader, **settings)

    _replace(module, load)


def patch_torch(torch: ModuleType) -> None:
    own = torch.save

    def save(obj: object, f: object, *arguments: object, **settings: object) -> None:
        is_path = isinstance(f, str | os.PathLike)
        if is_path and _was_there(f):
            return None
        if _tensor_bytes(torch, obj) <= _SMALL_BYTES:
            return own(obj, f, *arguments, **settings)
        if is_path:
            open(f, "wb").close()
        return None

    torch.save = torch.serialization.save = save


def patch_safetensors(module: ModuleType) -> None:
    own = module.save_file

    def save_file(tensors: dict, filename: str | os.PathLike, metadata: dict | None = None) -> None:
        if _was_there(filename):
            return None
        if sum(tensor.nbytes for tensor in tensors.values()) <= _SMALL_BYTES:
            return own(tensors, filename, metadata)
        open(filename, "wb").close()
        return None

    module.save_file = save_file


def _was_there(path: str | os.PathLike) -> bool:
    """Whether somebody else's file is there. From now on the path is this run's."""
    real = os.path.realpath(path)
    if real in _written:
        return False
    if os.path.lexists(path):
        return True
    _written.add(real)
    return False


def _make_folder(folder: str) -> None:
    missing = os.path.abspath(folder)
    new = []
    while not os.path.isdir(missing) and missing != os.path.dirname(missing):
        new.append(missing)
        missing = os.path.dirname(missing)
    os.makedirs(folder, exist_ok=True)
    _saved.add(os.path.realpath(folder))
    _made.extend(new)


def take_away_empty_folders() -> None:
    for folder in sorted(set(_made), key=len, reverse=True):
        with contextlib.suppress(OSError):  # something is in it
            os.rmdir(folder)


def _replace(module: ModuleType, *functions) -> None:
    package = sys.modules.get(module.__name__.rpartition(".")[0])
    for function in functions:
        setattr(module, function.__name__, function)
        if package is not None and hasattr(package, function.__name__):
            setattr(package, function.__name__, function)


def _tensor_bytes(torch: ModuleType, obj: object) -> int:
    """Bytes of the storages that torch.save would write. An object that cannot be pickled is left to torch.save, which
    says so."""
    import pickle

    sizes: dict[int, int] = {}

    class Counter(pickle.Pickler):
        def persistent_id(self, part: object) -> str | None:
            if isinstance(part, torch.storage.TypedStorage):
                part = part._untyped_storage
            if isinstance(part, torch.UntypedStorage):
                sizes[part.data_ptr() or id(part)] = part.nbytes()
                return "storage"
            return None

    try:
        Counter(io.BytesIO(), protocol=2).dump(obj)
    except Exception:
        return 0
    return sum(sizes.values())
