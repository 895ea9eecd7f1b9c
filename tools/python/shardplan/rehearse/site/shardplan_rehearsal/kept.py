# SPDX-License-Identifier: Apache-2.0
"""`--keep`: a process that has imported torch, and what the last run imported, stays; the next run's processes are forks of it.

    the next run                                       the kept process
    a Python process starts (sitecustomize)
      it sends its program, environment, folder  --->  forks a supervisor, which forks the program
      and its standard streams, and waits
      signals that it gets                       --->  go to the program
      the program's exit code                    <---  the supervisor waits for it

The process is the user's own, for one interpreter, library and environment of torch (`_key`). It ends when nobody has come for a while.
Nothing touches the device before a fork: the library reads its settings when it is first asked.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import json
import os
import select
import signal
import socket
import struct
import sys
import sysconfig
import tempfile
from typing import NoReturn

from .run import the_run

# What is read when libraries are loaded or modules imported.
_READ_EARLY = ("PYTORCH", "TORCH", "CUDA", "NCCL", "TRITON", "LD_", "PYTHON", "HF_", "TRANSFORMERS_")
_NOT_READ_EARLY = ("TORCHELASTIC_", "TORCH_NCCL_")
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def enter() -> None:
    """At the start of a Python process: its program goes on in a fork of the kept process, if there is one. Returns where there is none."""
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
    request = {**program, "argv": sys.orig_argv, "environment": dict(os.environ), "folder": os.getcwd(), "umask": _umask()}
    data = json.dumps(request).encode()
    socket.send_fds(connection, [struct.pack("!Q", len(data))], [_stream(number) for number in range(3)])
    connection.sendall(data)
    child = struct.unpack("!q", _receive(connection, 8))[0]
    for number in _FORWARDED:
        signal.signal(number, lambda received, _frame: os.kill(child, received))
    status = struct.unpack("!i", _receive(connection, 4))[0]
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


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError("the kept process has ended")
        data += part
    return data


def _program(words: list[str]) -> dict | None:
    """What the interpreter runs: a script or a module. None: something else, or with flags that a fork cannot have."""
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
    sources = [(name, os.stat(os.path.join(here, name)).st_mtime_ns) for name in sorted(os.listdir(here)) if name.endswith(".py")]
    torch = os.path.join(sysconfig.get_paths()["purelib"], "torch", "version.py")
    changed = os.stat(torch).st_mtime_ns if os.path.exists(torch) else 0
    early = sorted((name, value) for name, value in os.environ.items() if name.startswith(_READ_EARLY) and not name.startswith(_NOT_READ_EARLY))
    facts = json.dumps([os.path.realpath(sys.executable), sys.prefix, sys.version, sources, changed, early])
    return hashlib.sha256(facts.encode()).hexdigest()[:24]


def _folder() -> str | None:
    """Of this user alone; None: somebody else made it."""
    path = os.path.join(tempfile.gettempdir(), f"shardplan-kept-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    return path if found.st_uid == os.getuid() and found.st_mode & 0o170077 == 0o040000 else None


def _socket_path() -> str | None:
    folder = _folder()
    return None if folder is None else os.path.join(folder, _key())


def start() -> None:
    """Behind a run: a process for the next one, with the modules of this one. Where there is one already, nothing."""
    path = _socket_path()
    if path is None or os.path.exists(path) or "SHARDPLAN_KEPT" in os.environ:
        return
    import subprocess

    libraries = tuple({sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib")})
    own = __package__.split(".")[0]
    names = [name for name, module in list(sys.modules.items()) if str(getattr(module, "__file__", None) or "").startswith(libraries) and name.split(".")[0] not in (own, "__main__")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHARDPLAN_REHEARSE")}
    code = f"from {own} import kept; kept.serve({the_run().keep})"
    waiting = subprocess.Popen([sys.executable, "-c", code], env={**environment, "SHARDPLAN_KEPT": path}, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    with contextlib.suppress(OSError):
        waiting.stdin.write(json.dumps(names).encode())
        waiting.stdin.close()


def serve(idle_s: int) -> NoReturn:
    """The kept process."""
    path = os.environ.pop("SHARDPLAN_KEPT")
    names = json.loads(sys.stdin.buffer.read())
    os.environ["SHARDPLAN_REHEARSE"] = "{}"
    _import(names)
    door = socket.socket(socket.AF_UNIX)
    part = f"{path}.{os.getpid()}"
    door.bind(part)
    door.listen(16)
    os.rename(part, path)
    door.settimeout(idle_s)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are nobody's business
    try:
        while True:
            connection, _ = door.accept()
            connection.setblocking(True)
            if os.fork() == 0:
                door.close()
                _supervise(connection)
            connection.close()
    except TimeoutError:
        pass
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    os._exit(0)


def _import(names: list[str]) -> None:
    """torch with all patches in place, and what else a run imports. A module that cannot be imported without its script is left to the script."""
    from . import launchers, worker

    launchers.watch()
    worker.watch(begins=False)
    import torch

    # An import that asks whether there is a device must not begin it.
    kept = torch.cuda.is_available, torch.cuda.device_count, torch._C._cuda_getDeviceCount
    torch.cuda.is_available, torch.cuda.device_count, torch._C._cuda_getDeviceCount = (lambda: True), (lambda: 8), (lambda: 8)
    for name in names:
        with contextlib.suppress(BaseException):
            importlib.import_module(name)
    torch.cuda.is_available, torch.cuda.device_count, torch._C._cuda_getDeviceCount = kept


def _supervise(connection: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        head, streams, _, _ = socket.recv_fds(connection, 8, 3)
        request = json.loads(_receive(connection, struct.unpack("!Q", head)[0]))
        child = os.fork()
        if child == 0:
            connection.close()
            _become(request, streams)
        connection.sendall(struct.pack("!q", child))
        watched = os.pidfd_open(child)
        ready = select.poll()
        ready.register(watched, select.POLLIN)
        ready.register(connection, select.POLLIN)
        if not any(number == watched for number, _ in ready.poll()):
            os.kill(child, signal.SIGKILL)  # nobody waits for it any more
        _, status = os.waitpid(child, 0)
        connection.sendall(struct.pack("!i", status))
    except (OSError, EOFError, ValueError):
        pass
    os._exit(0)


def _become(request: dict, streams: list[int]) -> NoReturn:
    """This fork is the program."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.orig_argv[:] = request["argv"]
    sys.argv[:] = request["words"]
    script = request.get("script")
    sys.path[0] = os.path.dirname(os.path.realpath(script)) if script else os.getcwd()
    buffering = {"write_through": True} if request["unbuffered"] else {"line_buffering": os.isatty(1)}
    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False))
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(open(1, "wb", closefd=False), **buffering)
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(open(2, "wb", closefd=False), errors="backslashreplace", line_buffering=True)
    _seed()
    import torch

    from . import roles, run

    run._run = None
    torch.cuda._is_in_bad_fork = torch._C._cuda_isInBadFork = lambda: False  # nothing of the device was there before the fork
    roles.take_in_fork(torch)
    code = _exit_code(request)
    _end(code)


def _seed() -> None:
    """Each run has random numbers of its own, as a process of its own would."""
    import random

    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _exit_code(request: dict) -> int:
    import runpy

    try:
        if (script := request.get("script")) is not None:
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _end(code: int) -> NoReturn:
    import atexit
    import threading

    with contextlib.suppress(BaseException):
        threading._shutdown()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code)
