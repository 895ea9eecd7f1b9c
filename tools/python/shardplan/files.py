# SPDX-License-Identifier: Apache-2.0
"""Outputs of the commands: a file is written whole or not at all, and nothing else is left in its folder.

The C++ commands do the same (schemas/src/files/file_write.cc); each removes what the other's killed processes left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import select
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

_BEGIN, _END = ".shardplan-", ".tmp"
_OPEN_FILES = "/proc/self/fd"
_SCRATCH_BEGIN = "shardplan-scratch-"
_LOCK = "lock"
_READER_SECONDS = 2  # that a pipe's reader may take to open it
_WRITER_SECONDS = 5  # ... and its writer
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
_counter = itertools.count()


class CannotWrite(Exception):
    """An output cannot be written: a full disk, a missing folder, a folder in place of a file, no permission."""


class OutputIsInput(Exception):
    """An output would replace what is read."""


def check_output(path: str, inputs: Iterable[str]) -> None:
    """Before any work. OutputIsInput when the output is one of the inputs (by inode, so through links, too);
    CannotWrite when it cannot be written, as far as that can be told."""
    _target(path)
    with contextlib.suppress(OSError):
        output = os.stat(path)
        for name in inputs:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(name), output) and not stat.S_ISCHR(output.st_mode):
                    raise OutputIsInput(
                        f"an output is a file that is read, and would replace it (found -o {path}, expected another "
                        f"file than the input {name})"
                    )


def read_bytes(path: str | os.PathLike) -> bytes:
    """Everything in the file. OSError, also where it is a pipe that no process writes to: opening it would wait for
    ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            waiting = select.poll()
            waiting.register(descriptor, select.POLLIN)
            if not waiting.poll(1000 * _WRITER_SECONDS):
                raise OSError(errno.ENXIO, "it is a pipe, and no process writes to it", os.fspath(path))
        os.set_blocking(descriptor, True)
        return file.read()


def read_text(path: str | os.PathLike) -> str:
    return read_bytes(path).decode("utf-8")


def write_text(path: str | os.PathLike, text: str) -> None:
    with replacing(path) as file:
        file.write(text)


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
    with replacing(path) as file:
        file.buffer.write(data)


class LineLog:
    """A file that whole lines are appended to, each on the disk before `append` returns. The first `append`, and `end`,
    drop the rest of a line that a killed writer left; `close` alone leaves the file as it was found."""

    def __init__(self, path: str | os.PathLike):
        self._path = os.fspath(path)
        with _told(self._path):
            self._is_file = not os.path.exists(self._path) or os.path.isfile(self._path)
            # A device or a pipe has no lines that were there: some would never end.
            self._file = open(
                self._path, "a+b" if self._is_file else "wb", **({} if self._is_file else {"buffering": 0})
            )  # noqa: SIM115
            text = self._file.read() if self._is_file and self._file.seek(0) == 0 else b""
            whole = text[: text.rfind(b"\n") + 1]
        self._partly = len(whole) if len(whole) < len(text) else None
        self.text = whole.decode("utf-8", errors="surrogateescape")  # the lines that were there

    def append(self, line: str) -> None:
        with _told(self._path):
            self._drop_part_of_a_line()
            self._file.write(line.encode("utf-8", errors="surrogateescape"))
            self._file.flush()
            if self._is_file:
                os.fsync(self._file.fileno())

    def end(self, instead: str | None = None) -> None:
        """instead: of a file, the lines that take the place of all."""
        with _told(self._path):
            self._drop_part_of_a_line()
        self.close()
        if instead is not None and self._is_file:
            write_bytes(self._path, instead.encode("utf-8", errors="surrogateescape"))

    def close(self) -> None:
        self._file.close()

    def _drop_part_of_a_line(self) -> None:
        if self._partly is not None:
            self._file.truncate(self._partly)
            self._partly = None


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[TextIO]:
    """A text file that takes the place of `path` when the block ends without an error, with the owner and the mode of
    what was there. A link stays one; pipes and devices are written to. CannotWrite leaves the old file."""
    path = os.fspath(path)
    with _told(path):
        target, replaced = _target(path)
        if replaced is not None and not stat.S_ISREG(replaced.st_mode):
            with open(_open_in_place(path, replaced), "w", encoding="utf-8") as file:
                yield file
            return
        folder = os.open(os.path.dirname(target) or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            _remove_leftovers(folder)
            with contextlib.closing(_Temporary(folder)) as made:
                with open(made.descriptor, "w", encoding="utf-8", closefd=False) as file:
                    yield file
                if replaced is not None:
                    _keep_owner_and_mode(made.descriptor, replaced)
                os.fsync(made.descriptor)
                made.replace(os.path.basename(target))
            with contextlib.suppress(OSError):
                os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for the files of a running command. Folders of commands that were killed go with the next one's."""
    _remove_scratch_folders()
    folder, lock = _locked_folder()
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder() -> tuple[str, int]:
    while True:
        folder = tempfile.mkdtemp(prefix=_SCRATCH_BEGIN)
        lock = os.open(os.path.join(folder, _LOCK), os.O_CREAT | os.O_WRONLY, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink > 0:
            return folder, lock
        os.close(lock)  # another command took it for a killed one's before it was locked


def _remove_scratch_folders() -> None:
    """Removes folders of commands that live no more: nobody holds their lock."""
    with os.scandir(tempfile.gettempdir()) as entries:
        left = [entry.path for entry in entries if entry.name.startswith(_SCRATCH_BEGIN)]
    for path in left:
        with contextlib.suppress(OSError), open(os.path.join(path, _LOCK), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _told(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotWrite(f"cannot write {path}: {error.strerror or error}") from error


def _target(path: str) -> tuple[str, os.stat_result | None]:
    """The file that is made or replaced, links followed, and what is there."""
    with _told(path):
        if not path:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        try:
            replaced = os.stat(path)
        except FileNotFoundError:
            replaced = None
        if replaced is not None:
            if stat.S_ISDIR(replaced.st_mode):
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not os.access(path, os.W_OK):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            if not stat.S_ISREG(replaced.st_mode):
                return path, replaced
        target = os.path.realpath(path) if os.path.islink(path) else path
        folder, name = os.path.split(target)
        if not name:
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISDIR(os.stat(folder or ".").st_mode):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if len(os.fsencode(name)) > 255:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        if not os.access(folder or ".", os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return target, replaced


def _open_in_place(path: str, replaced: os.stat_result) -> int:
    """A descriptor of a pipe or a device. A reader of a pipe may be about to open it."""
    deadline = time.monotonic() + _READER_SECONDS
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
            os.set_blocking(descriptor, True)
            return descriptor
        except OSError as error:
            if error.errno != errno.ENXIO or not stat.S_ISFIFO(replaced.st_mode):
                raise
            if time.monotonic() > deadline:
                raise OSError(errno.ENXIO, "no process reads the pipe") from None
            time.sleep(0.02)


def _remove_leftovers(folder: int) -> None:
    for name in os.listdir(folder):
        if not (name.startswith(_BEGIN) and name.endswith(_END)):
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=folder)
            finally:
                os.close(descriptor)


def _keep_owner_and_mode(descriptor: int, replaced: os.stat_result) -> None:
    made = os.fstat(descriptor)
    if (made.st_uid, made.st_gid) != (replaced.st_uid, replaced.st_gid):
        os.fchown(descriptor, replaced.st_uid, replaced.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(replaced.st_mode))


class _Temporary:
    """A file without a name, or with one that nobody else uses where the file system has no others. Signals that end
    the process wait while it has a name."""

    def __init__(self, folder: int):
        self._folder, self._name, self._held = folder, None, None
        try:
            if not os.path.isdir(_OPEN_FILES):  # a chroot without /proc: a file without a name never gets one
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            self.descriptor = os.open(".", os.O_TMPFILE | os.O_WRONLY, 0o666, dir_fd=folder)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                raise
            self._hold()
            try:
                self._open_named()
            except OSError:
                self._release()
                raise

    def replace(self, target: str) -> None:
        self._hold()
        if self._name is None:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name = _temporary_name()
            # A folder descriptor makes os.link follow the link of /proc.
            source = f"{_OPEN_FILES}/{self.descriptor}"
            os.link(source, name, src_dir_fd=self._folder, dst_dir_fd=self._folder, follow_symlinks=True)
            self._name = name
        os.rename(self._name, target, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._name = None

    def close(self) -> None:
        if self._name is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self._folder)
        os.close(self.descriptor)
        self._release()

    def _hold(self) -> None:
        if self._held is None:
            self._held = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)

    def _release(self) -> None:
        if self._held is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._held)

    def _open_named(self) -> None:
        while self._name is None:
            name = _temporary_name()
            self.descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666, dir_fd=self._folder)
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self.descriptor).st_nlink > 0:
                self._name = name
            else:  # a cleaner took it for a leftover before it was locked
                os.close(self.descriptor)


def _temporary_name() -> str:
    return f"{_BEGIN}{os.getpid()}-{next(_counter)}p{_END}"
