#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Proves that the executor races in no plan of the conformance suite: recorded and optimised ones, every knob, random
models, each in memory of torch's allocator and of an arena. The ranks compute on the device in software, and rank 0 is
recorded.

    tests/python/races/executor_proof.py [RANKS ...]        needs build/dev; SHARDPLAN_EVERY=20: every 20th plan
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import types
from importlib.metadata import version

from proofs import ROOT, Proof, build_folder

sys.path.insert(0, str(ROOT / "tools" / "python"))

from shardplan.rehearse import recording  # noqa: E402

SUITE = build_folder() / "tests" / "executor" / "executor_cuda_conformance_test"
LIBRARY = build_folder() / "device" / "libshardplan_device.so"
RANKS = (1, 2, 3, 4, 8)
LIMIT_S = 1800


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A run of the suite: all that its rank 0 has issued."""

    raw: pathlib.Path
    ranks: int
    plans: int
    said: str  # by the suite

    def proof(self, without: tuple[str, ...] = ()) -> Proof:
        """without: kinds of events that are left out (docs/reference/recording-format.md)."""
        if not self.raw.exists():
            return Proof(-1, f"nothing was recorded:\n{self.said[-2000:]}")
        kept, document = self.raw.with_suffix(".kept"), self.raw.with_suffix(".json")
        left_out = tuple(f'["{kind}",' for kind in without)
        kept.write_text("".join(line for line in self.raw.open() if not left_out or not line.startswith(left_out)))
        told = {"result": {"torch": version("torch"), "rank": 0, "world_size": self.ranks}}
        recording.write(str(document), kept, told, types.SimpleNamespace(name="device in software"), ["suite"])
        os.environ.setdefault("SHARDPLAN_PROGRAMS", str(build_folder() / "bin"))
        proof = recording.prove(str(document))
        return Proof(proof.code, f"{proof.text}\n{proof.wrong}")


def record(
    program: pathlib.Path, ranks: int, every: int, folder: pathlib.Path | str, limit_s: float = LIMIT_S
) -> Recorded:
    """Wrong numbers are another test's matter."""
    raw = pathlib.Path(folder, "raw")
    said = _run(program, ranks, every, raw, limit_s)
    plans = re.search(r"^(\d+) cases on", said, re.MULTILINE)
    return Recorded(raw, ranks, int(plans.group(1)) if plans else 0, said)


def _run(program: pathlib.Path, ranks: int, every: int, raw: pathlib.Path, limit_s: float) -> str:
    """Returns the suite's output."""
    run = subprocess.Popen(
        [ROOT / "dev" / "on_device", LIBRARY, program, f"--gtest_filter=*EveryNumberIsRight/cuda_ranks{ranks}"],
        env={
            **os.environ, "SHARDPLAN_DEVICE_MODE": "inline", "SHARDPLAN_DEVICE_POISON": "0",
            "SHARDPLAN_EVERY": str(every), "SHARDPLAN_RECORDING": str(raw),
        },
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        return run.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)  # its ranks, too
        return f"{run.communicate()[0]}\nnot done within {limit_s} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", nargs="*", type=int, default=RANKS)
    options = parser.parse_args()
    cases = failures = 0
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            recorded = record(SUITE, ranks, int(os.environ.get("SHARDPLAN_EVERY", "1")), folder)
            proof = recorded.proof()
        good = proof.verdict == "none" and recorded.plans > 0 and "not looked at" not in proof.text
        cases += recorded.plans
        failures += not good
        print(f"| {ranks} | {recorded.plans} | {proof.accesses:,} | {len(proof.races)} |", flush=True)
        if not good:
            print(proof.text[-4000:])
    print(f"cases {cases}, failures {failures}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
