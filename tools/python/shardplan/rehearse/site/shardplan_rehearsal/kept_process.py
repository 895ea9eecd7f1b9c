# SPDX-License-Identifier: Apache-2.0
"""The process that `--keep` leaves (kept.py): it has imported torch, and forks the programs of later runs. Nothing
touches the device before a fork: the library reads its settings when it is first asked."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import select
import signal
import socket
import struct
import sys
from typing import NoReturn

from . import launchers, roles, run, worker
from .kept import receive


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
    """torch with all patches in place, and what else a run imports. A module that cannot be imported without its script
    is left to the script."""
    launchers.watch()
    worker.watch(begins=False)
    import torch

    # An import that asks whether there is a device must not begin it.
    kept = torch.cuda.is_available, torch.cuda.device_count, torch._C._cuda_getDeviceCount
    torch.cuda.is_available, torch.cuda.device_count, torch._C._cuda_getDeviceCount = (
        (lambda: True),
        (lambda: 8),
        (lambda: 8),
    )
    for name in names:
        with contextlib.suppress(BaseException):
            importlib.import_module(name)
    torch.cuda.is_available, torch.cuda.device_count, torch._C._cuda_getDeviceCount = kept


def _supervise(connection: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        head, streams, _, _ = socket.recv_fds(connection, 8, 3)
        request = json.loads(receive(connection, struct.unpack("!Q", head)[0]))
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
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(
        open(2, "wb", closefd=False), errors="backslashreplace", line_buffering=True
    )
    _seed()
    import torch

    run._run = None
    # Nothing of the device was there before the fork.
    torch.cuda._is_in_bad_fork = torch._C._cuda_isInBadFork = lambda: False
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
        getattr(atexit, "_run_exitfuncs")()  # noqa: B009: Python's, where torch's names are checked
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code)
