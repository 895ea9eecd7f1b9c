# SPDX-License-Identifier: Apache-2.0
"""`--keep`: a process that has imported torch, and what the last run imported, stays; the next run's processes are
forks of it.

    the next run                                       the kept process (kept_process.py)
    a Python process starts (sitecustomize)
      it sends its program, environment, folder  --->  forks a supervisor, which forks the program
      and its standard streams, and waits
      signals that it gets                       --->  go to the program
      the program's exit code                    <---  the supervisor waits for it

The process is the user's own, for one interpreter, library and environment of torch (`_key`). It ends when nobody has
come for a while.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import signal
import socket
import struct
import sys
import sysconfig
import tempfile
from typing import NoReturn

from .run import the_run

# Variables that are read when libraries are loaded or modules imported.
_READ_EARLY = ("PYTORCH", "TORCH", "CUDA", "NCCL", "TRITON", "LD_", "PYTHON", "HF_", "TRANSFORMERS_")
_NOT_READ_EARLY = ("TORCHELASTIC_", "TORCH_NCCL_")
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def enter() -> None:
    """At the start of a Python process: its program goes on in a fork of the kept process, if there is one. Returns
    where there is none."""
    path, program = _socket_path(), _program(sys.orig_argv)
    if program is None or path is None or not os.path.exists(path):
        return
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:  # it has ended without a farewell
        with contextlib.suppress(OSError):
            os.unlink(path)
        return
    _follow(connection, program)


def _follow(connection: socket.socket, program: dict) -> NoReturn:
    request = {
        **program, "argv": sys.orig_argv, "environment": dict(os.environ), "folder": os.getcwd(), "umask": _umask(),
    }
    data = json.dumps(request).encode()
    socket.send_fds(connection, [struct.pack("!Q", len(data))], [_stream(number) for number in range(3)])
    connection.sendall(data)
    child = struct.unpack("!q", receive(connection, 8))[0]
    for number in _FORWARDED:
        signal.signal(number, lambda received, _frame: os.kill(child, received))
    status = struct.unpack("!i", receive(connection, 4))[0]
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no other
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _stream(number: int) -> int:
    try:
        os.fstat(number)
    except OSError:
        return os.open(os.devnull, os.O_RDWR)
    return number


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError("the kept process has ended")
        data += part
    return data


def _program(words: list[str]) -> dict | None:
    """The script or module that the interpreter runs. None: something else, or with flags that a fork cannot have."""
    rest, unbuffered = words[1:], False
    while rest and rest[0] == "-u":
        rest, unbuffered = rest[1:], True
    if len(rest) >= 2 and rest[0] == "-m":
        return {"module": rest[1], "words": rest[1:], "unbuffered": unbuffered}
    if rest and not rest[0].startswith("-"):
        return {"script": rest[0], "words": rest, "unbuffered": unbuffered}
    return None


@functools.cache  # imports change the environment
def _key() -> str:
    here = os.path.dirname(os.path.abspath(__file__))
    sources = [
        (name, os.stat(os.path.join(here, name)).st_mtime_ns)
        for name in sorted(os.listdir(here))
        if name.endswith(".py")
    ]
    torch = os.path.join(sysconfig.get_paths()["purelib"], "torch", "version.py")
    changed = os.stat(torch).st_mtime_ns if os.path.exists(torch) else 0
    early = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(_READ_EARLY) and not name.startswith(_NOT_READ_EARLY)
    )
    facts = json.dumps([os.path.realpath(sys.executable), sys.prefix, sys.version, sources, changed, early])
    return hashlib.sha256(facts.encode()).hexdigest()[:24]


def _folder() -> str | None:
    """A folder of this user alone; None: somebody else made it."""
    path = os.path.join(tempfile.gettempdir(), f"shardplan-kept-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    return path if found.st_uid == os.getuid() and found.st_mode & 0o170077 == 0o040000 else None


def _socket_path() -> str | None:
    folder = _folder()
    return None if folder is None else os.path.join(folder, _key())


def start() -> None:
    """Behind a run: starts a process for the next one, with the modules of this one, unless there is one already."""
    path = _socket_path()
    if path is None or os.path.exists(path) or "SHARDPLAN_KEPT" in os.environ:
        return
    import subprocess

    libraries = tuple({sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib")})
    own = __package__.split(".")[0]
    names = [
        name
        for name, module in list(sys.modules.items())
        if str(getattr(module, "__file__", None) or "").startswith(libraries)
        and name.split(".")[0] not in (own, "__main__")
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHARDPLAN_REHEARSE")}
    code = f"from {own} import kept_process; kept_process.serve({the_run().keep})"
    waiting = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**environment, "SHARDPLAN_KEPT": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with contextlib.suppress(OSError):
        waiting.stdin.write(json.dumps(names).encode())
        waiting.stdin.close()
