# SPDX-License-Identifier: Apache-2.0
"""The store of a job whose peers are played: each does what this rank does.

[Note: what a store answers]
  add      counts for every rank: a barrier that waits until all have come ends at once
  get      what this rank has set; a key of another rank ("address/3" on rank 0) has what this rank set for itself
           ("address/0");
           the id of a NCCL communicator is 128 zero bytes, which the device in software does not read
  wait     ends for a key that `get` answers
Any other key has a value that only a peer knows: an error that names it, at once, where a real job would wait.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from types import ModuleType

from .run import the_run

_NCCL_ID_BYTES = 128
# ProcessGroupNCCL counts its communicators, of two ranks it names both; ProcessGroupNCCL2 has a word before the count.
_NCCL_KEY = re.compile(r"/cuda//(.*/)?\d+(:\d+)?$|UniqueNCCLID|nccl_storekey_\d+$")
_NUMBER = re.compile(r"\d+")
_kept: list[object] = []  # C++ keeps the store, not its Python object


def make(rank: int, world: int) -> object:
    """A store of this rank of so many."""
    from torch.distributed import Store

    class PlayedStore(Store):
        def __init__(self) -> None:
            super().__init__()
            self._values: dict[str, bytes] = {}
            _kept.append(self)

        def set(self, key: str, value: bytes | str) -> None:
            self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

        def get(self, key: str) -> bytes:
            found = self._find(key)
            if found is None:
                what_to_do = (
                    "rehearse rank 0 (--rank 0), which most often sets it"
                    if rank
                    else "no rehearsal of one rank knows its value: set it in the script"
                )
                raise RuntimeError(
                    f"rehearsal: rank {rank} reads the key {key!r} of the store, which only another rank sets, and "
                    f"peers are played: {what_to_do}"
                )
            return found

        def add(self, key: str, amount: int) -> int:
            number = int(self._values.get(key, b"0")) + amount * world
            self._values[key] = str(number).encode()
            return number

        def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
            if key not in self._values or self._values[key] == bytes(expected):
                self._values[key] = bytes(desired)
            return self._values[key]

        def append(self, key: str, value: bytes) -> None:
            self._values[key] = self._values.get(key, b"") + bytes(value)

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return [self.get(key) for key in keys]

        def multi_set(self, keys: list[str], values: list[bytes]) -> None:
            for key, value in zip(keys, values, strict=True):
                self.set(key, value)

        def check(self, keys: Iterable[str]) -> bool:
            return all(self._find(key) is not None for key in keys)

        def wait(self, keys: Iterable[str], timeout: object = None) -> None:
            for key in keys:
                self.get(key)

        def delete_key(self, key: str) -> bool:
            return self._values.pop(key, None) is not None

        def num_keys(self) -> int:
            return len(self._values)

        def has_extended_api(self) -> bool:
            return True

        def set_timeout(self, timeout: object) -> None:
            pass

        def clone(self) -> object:
            """It has no connection: threads may share it."""
            return self

        def _find(self, key: str) -> bytes | None:
            if key in self._values:
                return self._values[key]
            own = next((mine for mine in self._values if _is_a_peers(key, mine)), None)
            if own is not None:
                return self._values[own]
            return bytes(_NCCL_ID_BYTES) if _NCCL_KEY.search(key) else None

    def _is_a_peers(key: str, mine: str) -> bool:
        """Whether `mine` with another number in the place of this rank's is `key`."""
        if _NUMBER.sub("#", key) != _NUMBER.sub("#", mine):
            return False
        pairs = list(zip(_NUMBER.findall(key), _NUMBER.findall(mine), strict=True))
        changed = [pair for pair in pairs if pair[0] != pair[1]]
        return bool(changed) and all(own == str(rank) for _, own in changed)

    return PlayedStore()


def patch_rendezvous(module: ModuleType) -> None:
    def handler(url: str, **_settings: object):
        """Yields (store, rank, ranks): of the URL, else of the environment."""
        query = module._query_to_dict(module.urlparse(url).query)
        rank = int(query.get("rank", os.environ.get("RANK", the_run().rank)))
        world = int(query.get("world_size", os.environ.get("WORLD_SIZE", 1)))
        yield make(rank, world), rank, world

    for scheme in ("env", "tcp", "file"):
        module._rendezvous_handlers[scheme] = handler


def patch_names(distributed: ModuleType) -> None:
    """TCPStore and FileStore of the script."""
    if not distributed.is_available():
        return

    def played(own: type, default_world: int) -> type:
        class Played(own):  # a subclass: isinstance of the script stays true for stores that torch made
            def __new__(cls, *arguments: object, **settings: object) -> object:
                world = settings.get("world_size", arguments[default_world] if len(arguments) > default_world else None)
                return make(the_run().rank, int(world or os.environ.get("WORLD_SIZE", 1)))

        Played.__name__ = Played.__qualname__ = own.__name__
        return Played

    distributed.TCPStore = played(distributed.TCPStore, 2)
    distributed.FileStore = played(distributed.FileStore, 1)
