# SPDX-License-Identifier: Apache-2.0
"""Faults of ranks and of launchers, done to real processes: what each said, how long it took, and whether that is
right.

`python rank_faults.py --seed 7 --count 40` prints a table of the random ones 7 to 46, each made of its number alone;
the exit code is 1 when one of them went wrong.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import time

from rank_runs import HSDP, Started, Starter, listening, make_plan

SLACK_S = 60.0  # generous: other processes may have the cores
START_S = 300.0
SAID_S = 10.0  # until all have named a rank that died; it is less than one where the cores are free
LOOPBACK = "0100007F"  # as /proc/net has it


@dataclasses.dataclass(frozen=True)
class Fault:
    """`signal` to a rank, or to the outer process (rank -1), so long after all ranks train, or (connecting) after they
    are there."""

    how: str  # run, hand, torchrun
    program: str  # run: `shardplan run`; apply: training under sp.apply
    plan: str  # 3: shards of three ranks; 2x2: two replicas of two shards
    signal: int
    rank: int
    connecting: bool = False
    after_s: float = 0.1

    def describe(self) -> str:
        whom = "the outer process" if self.rank < 0 else f"rank {self.rank}"
        when = f"{self.after_s:.2f} s after {'the start' if self.connecting else 'all train'}"
        return f"{signal.Signals(self.signal).name} to {whom}, {when}; {self.how}, {self.program}, {self.plan}"

    def ranks(self) -> int:
        return 4 if self.plan == "2x2" else 3


@dataclasses.dataclass
class Outcome:
    fault: Fault
    wrong: list[str] = dataclasses.field(default_factory=list)
    said_s: float | None = None  # until the last survivor had named the rank
    ended_s: float | None = None  # until the last one had ended
    text: str = ""


def blamed(text: str) -> set[int]:
    """All ranks that a text says did not arrive, or died."""
    found: set[int] = set()
    for several in re.findall(r"ranks? ([0-9][0-9, and to]*?) (?:did not arrive|has died|was killed)", text):
        for part in re.split(r", | and ", several):
            first, _, last = part.partition(" to ")
            found |= set(range(int(first), int(last or first) + 1))
    return found


def await_start(fault: Fault, started: Started) -> dict[int, int] | None:
    """The ranks' processes, once it is time for the fault; None: they do not start."""
    deadline = time.monotonic() + START_S
    everybody = list(range(fault.ranks()))
    while len(started.pids()) < fault.ranks() and time.monotonic() < deadline:
        time.sleep(0.01)
    # A rank that dies before this in training is PyTorch's matter.
    word = "step 1 took" if not fault.connecting else "is in the group" if fault.program == "apply" else ""
    complete = time.monotonic()
    while not all(word in started.text(rank) for rank in everybody):
        now = time.monotonic()
        # A process that begins another program has no environment for a moment, and so no rank.
        if len(started.pids()) == fault.ranks():
            complete = now
        if now > deadline or now - complete > 1:
            return None
        time.sleep(0.02)
    pids = started.pids()
    time.sleep(fault.after_s)
    return pids if len(pids) == fault.ranks() else None


def judge_sockets(outcome: Outcome, started: Started) -> None:
    """`shardplan run` listens on the loopback interface alone. (In training it is PyTorch who listens.)"""
    fault = outcome.fault
    if fault.program == "run" and fault.how != "torchrun" and not fault.connecting:
        addresses = listening(started.all_pids())
        if addresses != {LOOPBACK}:
            outcome.wrong.append(f"listens at {sorted(addresses)}")


def ready(outcome: Outcome, started: Started) -> dict[int, int] | None:
    """The processes by rank, once the fault may come."""
    pids = await_start(outcome.fault, started)
    if pids is None:
        outcome.wrong.append("does not start")
    else:
        judge_sockets(outcome, started)
    return pids


def try_rank(fault: Fault, starter: Starter, plan: pathlib.Path, folder: pathlib.Path) -> Outcome:
    outcome = Outcome(fault)
    started = starter.start(fault.how, fault.program, plan, fault.ranks(), folder)
    try:
        pids = ready(outcome, started)
        if pids is None:
            return outcome
        os.kill(pids[fault.rank], fault.signal)
        begin = time.monotonic()
        judge_survivors(outcome, started, pids, begin, starter.timeout_s)
    finally:
        outcome.text = started.text()
        started.end()
    return outcome


def await_word(
    fault: Fault, started: Started, survivors: list[int], pids: dict[int, int], deadline: float
) -> float | None:
    """Seconds until all survivors name the rank; None: they end before, or time does."""
    begin = time.monotonic()
    while time.monotonic() < deadline:
        if all(fault.rank in blamed(started.text(rank)) for rank in survivors):
            return time.monotonic() - begin
        if started.await_end(survivors, pids, time.monotonic()):
            return None
        time.sleep(0.01)
    return None


def judge_survivors(outcome: Outcome, started: Started, pids: dict[int, int], begin: float, timeout_s: float) -> None:
    fault = outcome.fault
    survivors = [rank for rank in range(fault.ranks()) if rank != fault.rank]
    # A stopped one is waited for, and so is one that died before it was there; the others see a death.
    waits = fault.connecting or fault.signal == signal.SIGSTOP
    patience = timeout_s + SLACK_S if waits else SLACK_S
    outcome.said_s = await_word(fault, started, survivors, pids, begin + patience)
    if not waits and outcome.said_s is not None and outcome.said_s > SAID_S:
        outcome.wrong.append(f"it is named by all after {outcome.said_s:.1f} s, not within {SAID_S:g} s")
    if not started.await_end(survivors, pids, begin + patience):
        outcome.wrong.append(f"ranks still run after {patience:g} s")
    outcome.ended_s = time.monotonic() - begin
    # torchrun ends the ranks that were not there yet, and tells itself of whom.
    if fault.how == "torchrun" and fault.connecting:
        return
    said = {rank: blamed(started.text(rank)) for rank in survivors}
    # torchrun sees a death itself and ends the others with SIGTERM: on busy cores one may have had no time to speak.
    may_be_silent = fault.how == "torchrun" and fault.signal == signal.SIGKILL and any(said.values())
    for rank, names in said.items():
        if names != {fault.rank} and not (may_be_silent and not names):
            outcome.wrong.append(f"rank {rank} names {sorted(names) or 'nobody'}")


def try_launcher(fault: Fault, starter: Starter, plan: pathlib.Path, folder: pathlib.Path) -> Outcome:
    outcome = Outcome(fault)
    started = starter.start("run", "run", plan, fault.ranks(), folder)
    outer = started.processes[0]
    try:
        pids = ready(outcome, started)
        if pids is None:
            return outcome
        os.kill(outer.pid, fault.signal)
        begin = time.monotonic()
        if not started.await_end(list(pids), pids, begin + SLACK_S):
            outcome.wrong.append(f"ranks still run after {SLACK_S:g} s")
        outcome.ended_s = time.monotonic() - begin
        code = outer.wait(SLACK_S)
        expected = -fault.signal if fault.signal == signal.SIGKILL else 128 + fault.signal
        if code != expected:
            outcome.wrong.append(f"exit code {code}, not {expected}")
        left = sorted(path.name for path in folder.iterdir() if path.name != "log")
        if left:
            outcome.wrong.append(f"left behind: {left}")
    finally:
        outcome.text = started.text()
        started.end()
    return outcome


def attempt(fault: Fault, starter: Starter, plans: dict[str, pathlib.Path], folder: pathlib.Path) -> Outcome:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    function = try_launcher if fault.rank < 0 else try_rank
    return function(fault, starter, plans[fault.plan], folder)


def random_fault(choose: random.Random) -> Fault:
    plan = choose.choice(["3", "2x2"])
    if choose.random() < 0.2:
        number = choose.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL])
        return Fault("run", "run", plan, number, -1, after_s=choose.random())
    how = choose.choice(["run", "hand", "torchrun"])
    program = "run" if how == "run" else choose.choice(["run", "apply"])
    number = choose.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
    connecting = number != signal.SIGSTOP and choose.random() < 0.4
    after_s = choose.uniform(0, 2 if connecting else 0.5)
    return Fault(how, program, plan, number, choose.randrange(4 if plan == "2x2" else 3), connecting, after_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    options = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="shardplan-ranks-"))
    starter = Starter(options.build.resolve())
    plans = {"3": make_plan(starter.shardplan(), folder, 3), "2x2": make_plan(starter.shardplan(), folder, 4, HSDP)}
    totals: collections.Counter = collections.Counter()
    said: list[float] = []
    for number in range(options.seed, options.seed + options.count):
        outcome = attempt(random_fault(random.Random(number)), starter, plans, folder / "ranks")
        times = [("said", outcome.said_s), ("ended", outcome.ended_s)]
        spans = " ".join(f"{name} {value:5.2f} s" if value is not None else f"{name} {'-':>7}" for name, value in times)
        verdict = "right" if not outcome.wrong else "WRONG: " + "; ".join(outcome.wrong)
        totals[verdict[:5]] += 1
        print(f"{number:4} {outcome.fault.describe():90} {spans} {verdict}", flush=True)
        if outcome.wrong:
            print("".join(f"       | {line}\n" for line in outcome.text.splitlines() if "took" not in line), flush=True)
        if outcome.said_s is not None and not outcome.fault.connecting and outcome.fault.signal != signal.SIGSTOP:
            said.append(outcome.said_s)
    print(dict(totals))
    if said:
        print(f"deaths while all train: said by all after {max(said):.2f} s at most ({len(said)} of them)")
    print(f"cases {options.count}, failures {totals['WRONG']}")
    shutil.rmtree(folder, ignore_errors=True)
    return 1 if totals["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
