# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a rehearsed run: their bulk goes nowhere, and numbers that are read have no meaning.

torch.distributed.checkpoint.save and async_save make the folder and write nothing into it. torch.save and safetensors' save_file write as ever up to
16 MiB of tensors, and an empty file above. torch.distributed.checkpoint.load of a folder that has a checkpoint leaves the tensors as they are.
"""

from __future__ import annotations

import io
import os
import sys
from types import ModuleType

_SMALL_BYTES = 16 << 20


def patch_saver(module: ModuleType) -> None:
    from torch.distributed.checkpoint.metadata import Metadata

    def save(state_dict: dict, *_arguments: object, checkpoint_id: object = None, storage_writer: object = None, **_settings: object) -> object:
        folder = checkpoint_id if checkpoint_id is not None else getattr(storage_writer, "path", None)
        if isinstance(folder, str | os.PathLike) and "://" not in os.fspath(folder):
            os.makedirs(folder, exist_ok=True)
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

    def load(state_dict: dict, *arguments: object, checkpoint_id: object = None, storage_reader: object = None, **settings: object) -> None:
        folder = checkpoint_id if checkpoint_id is not None else getattr(storage_reader, "path", None)
        if folder is not None and os.path.isfile(os.path.join(os.fspath(folder), ".metadata")):
            return None
        return own(state_dict, *arguments, checkpoint_id=checkpoint_id, storage_reader=storage_reader, **settings)

    _replace(module, load)


def patch_torch(torch: ModuleType) -> None:
    own = torch.save

    def save(obj: object, f: object, *arguments: object, **settings: object) -> None:
        if _tensor_bytes(torch, obj) <= _SMALL_BYTES:
            return own(obj, f, *arguments, **settings)
        if isinstance(f, str | os.PathLike):
            open(f, "wb").close()
        return None

    torch.save = torch.serialization.save = save


def patch_safetensors(module: ModuleType) -> None:
    own = module.save_file

    def save_file(tensors: dict, filename: str | os.PathLike, metadata: dict | None = None) -> None:
        if sum(tensor.nbytes for tensor in tensors.values()) <= _SMALL_BYTES:
            return own(tensors, filename, metadata)
        open(filename, "wb").close()
        return None

    module.save_file = save_file


def _replace(module: ModuleType, *functions) -> None:
    package = sys.modules.get(module.__name__.rpartition(".")[0])
    for function in functions:
        setattr(module, function.__name__, function)
        if package is not None and hasattr(package, function.__name__):
            setattr(package, function.__name__, function)


def _tensor_bytes(torch: ModuleType, obj: object) -> int:
    """Of the storages that torch.save would write. An object that cannot be pickled is left to torch.save, which says so."""
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
