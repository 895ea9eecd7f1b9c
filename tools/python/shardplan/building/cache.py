# SPDX-License-Identifier: Apache-2.0
"""Compiled modules on disk: a folder for each set of facts that they depend on. It is made whole or not at all, once
for the ranks of a node."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shardplan import files

from .errors import NotBuilt

_WHOLE = "built.json"  # written last
_TELL_AFTER_S = 2


def cache_folder() -> Path:
    """$SHARDPLAN_CACHE, else shardplan in the user's cache folder (XDG)."""
    if given := os.environ.get("SHARDPLAN_CACHE"):
        return Path(given).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardplan"


def kept(facts: tuple[str, ...], compiler: str) -> Path | None:
    """The folder of what was compiled of these."""
    return _kept(_folder(facts, compiler))


def kept_of_any_compiler(facts: tuple[str, ...]) -> Path | None:
    """For a machine without one that reads the folder of another machine."""
    folders = _folder(facts, "").parent.glob(f"{_digest(*facts)}-*")
    return next((found for folder in sorted(folders) if (found := _kept(folder)) is not None), None)


def get(facts: tuple[str, ...], compiler: str, make: Callable[[Path], None]) -> Path:
    """The folder that is kept for these facts. make(folder): fills the folder; its NotBuilt is raised in the processes
    that waited for it, too."""
    folder = _folder(facts, compiler)
    if (found := _kept(folder)) is None:
        started = time.time()
        with _explained(folder), _locked(folder):
            if (found := _kept(folder)) is None:
                _raise_what_another_met(folder, started)
                found = _made(folder, (*facts, compiler), make)
    return found


def _folder(facts: tuple[str, ...], compiler: str) -> Path:
    return cache_folder() / "built" / f"{_digest(*facts)}-{_digest(compiler)[:8]}"


def _digest(*facts: str) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _kept(folder: Path) -> Path | None:
    """None, too, where a file is not what was made: a part of a module that is mapped ends the process without a
    word."""
    try:
        names = json.loads((folder / _WHOLE).read_text())
        whole = all(_digest_of(folder / name) == digest for name, digest in names["sha256"].items())
        return folder if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _made(folder: Path, facts: tuple[str, ...], make: Callable[[Path], None]) -> Path:
    # A process that was killed has left it: no other has the lock.
    for left in (folder, *folder.parent.glob(f"{folder.name}.part*")):
        shutil.rmtree(left, ignore_errors=True)
    part = folder.with_name(f"{folder.name}.part{os.getpid()}")
    part.mkdir()
    try:
        try:
            make(part)
        except NotBuilt as error:
            files.write_text(_failure(folder), str(error))
            raise
        names = {"sha256": {path.name: _digest_of(path) for path in sorted(part.iterdir())}, "facts": facts}
        files.write_text(part / _WHOLE, json.dumps(names, indent=1) + "\n")
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    with contextlib.suppress(OSError):
        _failure(folder).unlink()
    found = _kept(folder)
    if found is None:
        raise NotBuilt(f"{folder} is not complete: remove it")
    return found


def _failure(folder: Path) -> Path:
    return folder.with_suffix(".failed")


def _raise_what_another_met(folder: Path, started: float) -> None:
    """While this process waited, another tried: a second try would end in the same way."""
    with contextlib.suppress(OSError):
        if _failure(folder).stat().st_mtime >= started:
            raise NotBuilt(_failure(folder).read_text())


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, files.CannotWrite) as error:
        raise NotBuilt(
            f"what is compiled cannot be kept in {folder.parent} ({getattr(error, 'strerror', None) or error}): set "
            "SHARDPLAN_CACHE to a folder that can be written, or "
            "run `shardplan doctor --build` where this one can"
        ) from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # It stays: a removed one would be two.
    with open(os.open(folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "rb") as file:
        begin, told = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told and time.monotonic() - begin > _TELL_AFTER_S:
                    told = True
                    print("shardplan: waits for another process that compiles the same", file=sys.stderr, flush=True)
                time.sleep(0.2)
        yield
