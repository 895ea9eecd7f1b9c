# SPDX-License-Identifier: Apache-2.0
"""Starts ranks as users do, and reads what each says: by `shardplan run`, one by one by hand, by torchrun."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
WIDTH = 64  # of rank_training's layers
HSDP = [{"name": "replicate", "size": 2}, {"name": "shard", "size": 2}]


def make_plan(
    shardplan: pathlib.Path, folder: pathlib.Path, ranks: int, mesh: list | None = None, tokens: int = 8
) -> pathlib.Path:
    """A plan of examples/three_layers with small layers, for so many ranks."""
    trace = json.loads((ROOT / "examples" / "three_layers" / "trace.json").read_text())
    for parameter in trace["parameters"]:
        parameter.update(shape=[WIDTH, WIDTH], dtype="float32")
    trace["compute_dtype"], trace["tokens_per_batch"] = "float32", tokens
    text = json.dumps(trace).replace('"bfloat16"', '"float32"').replace("33554432", str(WIDTH * WIDTH * 4))
    cluster = json.loads((ROOT / "examples" / "train_gpt" / "cluster.json").read_text())
    cluster["ranks"] = cluster["ranks_per_node"] = ranks
    strategy = {
        "schema": "shardplan.strategy/1", "policy": "fsdp2", "units": [{"modules": ["layers.*"]}],
        "optimizer": {"kind": "sgd"},
    }
    if mesh:
        strategy["mesh"] = mesh
    name = f"{'x'.join(str(dim['size']) for dim in mesh) if mesh else ranks}_{tokens}"
    paths = {kind: folder / f"{name}.{kind}.json" for kind in ("trace", "cluster", "strategy", "plan")}
    paths["trace"].write_text(text)
    paths["cluster"].write_text(json.dumps(cluster))
    paths["strategy"].write_text(json.dumps(strategy))
    command = [shardplan, "plan", paths["trace"], "--cluster", paths["cluster"], "--strategy", paths["strategy"]]
    done = subprocess.run([*map(str, command), "-q", "-o", str(paths["plan"])], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return paths["plan"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def descendants(pid: int) -> list[int]:
    found = []
    try:
        tasks = list(pathlib.Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return found
    for child in children:
        found += [child, *descendants(child)]
    return found


def rank_of(pid: int) -> int | None:
    """The first RANK in its environment."""
    try:
        entries = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(entry[5:]) for entry in entries if entry.startswith(b"RANK=")), None)


def is_alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def listening(pids: list[int]) -> set[str]:
    """Addresses that these processes listen at, as /proc/net has them."""
    inodes = set()
    for pid in pids:
        for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(entry)
            except OSError:  # closed since
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    tables = [pathlib.Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    sockets = [line.split() for table in tables for line in table]
    return {fields[1].split(":")[0] for fields in sockets if fields[3] == "0A" and fields[9] in inodes}


@dataclasses.dataclass
class Started:
    """Ranks that run. `logs`: a file for each, or one for all."""

    processes: list[subprocess.Popen]  # the ranks, or what starts them
    logs: list[pathlib.Path]
    ranks: int

    def pids(self) -> dict[int, int]:
        """rank -> process, of those that are there."""
        return {rank: pid for pid in self.all_pids() if (rank := rank_of(pid)) is not None}

    def all_pids(self) -> list[int]:
        return [pid for process in self.processes for pid in (process.pid, *descendants(process.pid))]

    def text(self, rank: int | None = None) -> str:
        """All that was said, or by that rank."""
        logs = self.logs if rank is None or len(self.logs) == 1 else [self.logs[rank]]
        text = "".join(log.read_text(errors="replace") for log in logs if log.exists())
        if rank is None or len(self.logs) > 1:
            return text
        return "".join(line for line in text.splitlines(True) if line.startswith(f"rank {rank}: "))

    def await_end(self, ranks: list[int], pids: dict[int, int], deadline: float) -> bool:
        """Have these ranks ended? Looks at least once."""
        while True:
            for process in self.processes:
                process.poll()
            if not any(is_alive(pids[rank]) for rank in ranks if rank in pids):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)

    def end(self) -> None:
        for pid in self.all_pids():
            for number in (signal.SIGKILL, signal.SIGCONT):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    break
        for process in self.processes:
            process.wait()


@dataclasses.dataclass(frozen=True)
class Starter:
    """How ranks are started, in a folder of their own."""

    build: pathlib.Path
    timeout_s: int = 4
    steps: int = 100_000

    def shardplan(self) -> pathlib.Path:
        return self.build / "bin" / "shardplan"

    def _environment(self, **more: str) -> dict[str, str]:
        path = os.pathsep.join([str(ROOT / "tools" / "python"), str(HERE)])
        return {
            **os.environ, "PYTHONPATH": path, "SHARDPLAN_BUILD": str(self.build), "GLOO_SOCKET_IFNAME": "lo", **more,
        }

    def _rank_command(self, program: str, plan: pathlib.Path | str) -> list[str]:
        if program == "apply":
            return [sys.executable, str(HERE / "rank_training.py"), str(plan), str(self.timeout_s), str(self.steps)]
        flags = ["--steps", str(self.steps), "--compute-scale", "0.1", "--timeout-s", str(self.timeout_s), "--progress"]
        return [str(self.shardplan()), "run", str(plan), *flags]

    def start(self, how: str, program: str, plan: pathlib.Path | str, ranks: int, folder: pathlib.Path) -> Started:
        """how: "run", "hand" or "torchrun". `plan` may have %RANK% in it, except for "run"."""
        folder.mkdir(parents=True, exist_ok=True)
        if how == "run":
            return self._start_run(plan, ranks, folder)
        return (self._start_by_hand if how == "hand" else self._start_torchrun)(program, plan, ranks, folder)

    def _start_run(self, plan, ranks: int, folder: pathlib.Path) -> Started:
        log = folder / "log"
        with open(log, "w") as file:
            process = subprocess.Popen(
                self._rank_command("run", plan), stdout=file, stderr=file, env=self._environment(TMPDIR=str(folder))
            )
        return Started([process], [log], ranks)

    def _start_by_hand(self, program: str, plan, ranks: int, folder: pathlib.Path) -> Started:
        port = str(free_port())
        processes, logs = [], []
        for rank in range(ranks):
            logs.append(folder / f"rank{rank}")
            environment = self._environment(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=port
            )
            command = self._rank_command(program, str(plan).replace("%RANK%", str(rank)))
            with open(logs[-1], "w") as file:
                processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))
        return Started(processes, logs, ranks)

    def _start_torchrun(self, program: str, plan, ranks: int, folder: pathlib.Path) -> Started:
        words = " ".join(self._rank_command(program, plan)).replace("%RANK%", "$RANK")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port"]
        command += [str(free_port()), "--no-python", "sh", "-c", f"exec {words} >{folder}/rank$RANK 2>&1"]
        with open(folder / "torchrun", "w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=self._environment())
        return Started([process], [folder / f"rank{rank}" for rank in range(ranks)], ranks)
