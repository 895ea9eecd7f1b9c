# SPDX-License-Identifier: Apache-2.0
"""Python programs and ranks as forks of a server that has imported torch, and done nothing else: importing takes
seconds, longer than most of them.

The server is multiprocessing's fork server, one for each run of pytest, which starts it when it is first asked. It has
no thread and no process group, and has run no backward; every program is a fork of its own. Programs that need an
interpreter of their own are started as ever: torchrun, a preloaded library, environment variables that torch reads when
it is imported.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import traceback

IMPORTED = [
    "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.optim", "torch.optim", "shardplan.torch",
]
IMPORTED += [f"transformers.models.{family}.modeling_{family}" for family in ("llama", "mixtral", "t5", "vit")]


def server() -> multiprocessing.context.BaseContext:
    """Its processes are forks of the server."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    return multiprocessing.get_context("forkserver")


def begin(environment: dict[str, str]) -> None:
    """First of all in a fork: the environment is the server's until then."""
    gc.freeze()  # what is imported stays: no collection looks at it, and no page of it is copied
    os.environ.clear()
    os.environ.update(environment)


def _program(words: list[str], environment: dict[str, str], folder: str, output: str, errors: str) -> None:
    begin(environment)
    for stream, path in ((1, output), (2, errors)):
        file = os.open(path, os.O_WRONLY)
        os.dup2(file, stream)
        os.close(file)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(open(stream, "wb", closefd=False), write_through=True) for stream in (1, 2)
    )
    os.chdir(folder)
    own = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    code = 0
    try:
        if words[0] == "-c":
            sys.path[:0] = ["", *own]
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.path[:0] = [str(pathlib.Path(words[0]).resolve().parent), *own]
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.exit(code)


class Program:
    """A script, or -c and a text, with its arguments, as `python WORDS...` would run it."""

    def __init__(self, words: list, env: dict[str, str] | None = None, cwd: str | pathlib.Path | None = None) -> None:
        self.words = [str(word) for word in words]
        self._said = [tempfile.NamedTemporaryFile("r", prefix="warm") for _ in range(2)]
        names = [file.name for file in self._said]
        self._process = server().Process(
            target=_program, args=(self.words, dict(env or os.environ), str(cwd or os.getcwd()), *names)
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """The same as Popen's."""
        self._process.join(timeout)
        if self.returncode is None:
            self._process.kill()
            raise subprocess.TimeoutExpired(self.words, timeout)
        return tuple(file.read() for file in self._said)


def run(
    words: list, env: dict[str, str] | None = None, cwd: str | pathlib.Path | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess:
    program = Program(words, env, cwd)
    output, errors = program.communicate(timeout)
    return subprocess.CompletedProcess(program.words, program.returncode, output, errors)
