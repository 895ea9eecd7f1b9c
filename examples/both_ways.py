# SPDX-License-Identifier: Apache-2.0
"""Runs a training script on two ranks of this machine, first as it is and then with --plan, and says whether both print
the same steps.

    both_ways.py OUTPUT MODULE[,MODULE]... train.py [ARGUMENT]...

Each run is `torchrun --nproc-per-node 2 train.py ARGUMENT...`, but the ranks are forks of this process, which has
imported the modules before: importing PyTorch takes longer than the training. A run's folder, OUTPUT/fsdp2 or
OUTPUT/plan, is where the ranks work and what they print is kept.
"""

from __future__ import annotations

import importlib
import multiprocessing.connection
import os
import pathlib
import runpy
import socket
import sys

RANKS = 2
WAYS = {"fsdp2": [], "plan": ["--plan"]}


def rank(number: int, port: int, folder: pathlib.Path, script: pathlib.Path, arguments: list[str]) -> None:
    """One rank, with the environment of torchrun."""
    own, all_ranks = str(number), str(RANKS)
    os.environ |= {"RANK": own, "LOCAL_RANK": own, "WORLD_SIZE": all_ranks, "LOCAL_WORLD_SIZE": all_ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for stream, name in ((1, "printed"), (2, "errors")):
        os.dup2(os.open(folder / f"{name}{number}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644), stream)
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def steps_of(folder: pathlib.Path, script: pathlib.Path, arguments: list[str]) -> list[str]:
    """The lines of steps that the first rank prints. SystemExit, with the ranks' errors, where one of them fails."""
    from torch.distributed import TCPStore

    folder.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        ranks = [
            multiprocessing.get_context("fork").Process(target=rank, args=(i, port, folder, script, arguments))
            for i in range(RANKS)
        ]
        for process in ranks:
            process.start()
        # After the forks, which must not inherit its threads.
        store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listening.fileno())
        )
        while running := [process for process in ranks if process.exitcode is None]:
            multiprocessing.connection.wait([process.sentinel for process in running])
            if any(process.exitcode for process in ranks):  # the others would wait for it
                for process in running:
                    process.kill()
        del store
    if any(process.exitcode != 0 for process in ranks):
        sys.exit("".join(file.read_text() for file in sorted(folder.glob("errors*"))))
    return [line for line in (folder / "printed0").read_text().splitlines() if line.startswith("step ")]


def main() -> int:
    output, modules, script, *arguments = sys.argv[1:]
    for name in modules.split(","):
        importlib.import_module(name)
    folder = pathlib.Path(output).resolve()
    by_fsdp2, by_plan = (
        steps_of(folder / way, pathlib.Path(script).resolve(), [*arguments, *more]) for way, more in WAYS.items()
    )
    print("\n".join(by_plan), file=sys.stderr)
    if by_plan and by_plan == by_fsdp2:
        print(
            f"{len(by_plan)} lines of losses and gradient norms, by a plan and under FSDP2: the same, digit for digit"
        )
        return 0
    print("DIFFERENT under FSDP2:", *by_fsdp2, sep="\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
